// SPDX-License-Identifier: Apache-2.0
// MXFP8 on sm_100a: the quantisers, and the GEMMs that read and write e4m3 with a scale e8m0 for every 32 elements
// along k (docs/numerics.md#fp8-and-mxfp8). Host side: the calls' arguments and launchers. Rows have their scales
// beside each other, ScaleLayout::matrix; weights, along the k of the GEMM, in ScaleLayout::atoms as quantise_weights()
// gives them. Tensors are aligned to 16 bytes. Compiled and emulated, never run on hardware.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernel_limits.hpp"
#include "projection.hpp"
#include "tessera/low_precision.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

/// Codes and scales of x: those of tessera::quantise() with QuantiseBlock::row_32, ScaleRule::rceil and
/// ScaleLayout::matrix, byte for byte.
struct QuantiseRowsMxfp8Arguments {
  void const* gmem_x;   // (rows,width) bf16
  int64_t rows, width;  // width: a multiple of 128
  int64_t pitch;        // elements from row to row, a multiple of 8
  void* gmem_codes;     // (rows,width) e4m3
  void* gmem_scales;    // (rows,width/32) e8m0
};
cudaError_t launch_quantise_rows_mxfp8(QuantiseRowsMxfp8Arguments const& args, cudaStream_t stream);

/// The way back: codes times scales, rounded to bf16, as tessera::dequantise() gives them.
struct DequantiseRowsMxfp8Arguments {
  void const* gmem_codes;   // (rows,width) e4m3
  void const* gmem_scales;  // (rows,width/32) e8m0
  int64_t rows, width;      // width: a multiple of 128
  void* gmem_values;        // (rows,width) bf16
};
cudaError_t launch_dequantise_rows_mxfp8(DequantiseRowsMxfp8Arguments const& args,
                                         cudaStream_t stream);

/// Weights in both orientations, of the same values, as tessera::quantise_weights() gives those of either projection.
struct QuantiseWeightsMxfp8Arguments {
  /// gate and up, or the one matrix: `rows` rows of `width`. What is contiguous in memory has whole 16 bytes.
  WeightRows w[2];
  int64_t rows, width;  // multiples of 128; up: n, d; down: d, n
  int32_t halves;       // matrices of an expert; up: 2, down: 1
  int32_t experts;      // E
  void*
      gmem_codes;  // (E,halves,rows,width) e4m3, in blocks along width; null: not made, as are those below
  void* gmem_scales;    // (E,halves,scale_atom_bytes(rows, width/32))
  void* gmem_codes_t;   // (E,width,halves*rows), in blocks along rows
  void* gmem_scales_t;  // (E,scale_atom_bytes(width, halves*rows/32))
};
cudaError_t launch_quantise_weights_mxfp8(QuantiseWeightsMxfp8Arguments const& args,
                                          cudaStream_t stream);

/// hb_r = rnd(x8[gather_index[r]] w8_up[e]^T) of the dequantised operands, a_r = act(hb_r), for rows r of expert e; h
/// is [gate half | up half]. Out: codes of hb and of a before it is rounded. An output that is null is not stored.
struct UpProjectionFwdMxfp8Arguments {
  void const* gmem_x;                  // (T,d) e4m3
  void const* gmem_x_scales;           // (T,d/32) e8m0
  int32_t const* gmem_gather_index;    // (P) row -> row of x; null: row r of x
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_up;               // (E,2,n,d) e4m3
  void const* gmem_w_up_scales;        // (E,2,scale_atom_bytes(n, d/32))
  Activation activation;               // swiglu
  void* gmem_h;                        // (P,2n) e4m3
  void* gmem_a;                        // (P,n) e4m3
  void* gmem_h_scales;                 // (P,2n/32)
  void* gmem_a_scales;                 // (P,n/32)
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n: multiples of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_up_projection_fwd_mxfp8(UpProjectionFwdMxfp8Arguments const& args, int sm_count,
                                           cudaStream_t stream);

/// y_r = rnd(a8_r w8_down[e]^T) of the dequantised operands.
struct DownProjectionFwdMxfp8Arguments {
  void const* gmem_a;                  // (P,n) e4m3
  void const* gmem_a_scales;           // (P,n/32)
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_down;             // (E,d,n) e4m3
  void const* gmem_w_down_scales;      // (E,scale_atom_bytes(d, n/32))
  void* gmem_y;                        // (P,d) bf16
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n: multiples of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_down_projection_fwd_mxfp8(DownProjectionFwdMxfp8Arguments const& args,
                                             int sm_count, cudaStream_t stream);

/// t_r = dO8[gather_index[r]] w8_down[e] of the dequantised operands, never rounded nor stored; with h_r the values of
/// the codes and s the score of row r: ds_r = <t_r, act(h_r)>, dh_r = rnd(J_act(h_r)^T s t_r), dh8_r the codes of that,
/// a'_r = rnd(s act(h_r)). h and dh are [gate half | up half]. An output that is null is not stored.
struct DownProjectionDgradMxfp8Arguments {
  void const* gmem_d_o;                // (T,d) e4m3
  void const* gmem_d_o_scales;         // (T,d/32)
  int32_t const* gmem_gather_index;    // (P) row -> row of d_o; null: row r of d_o
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_down_t;           // (E,n,d) e4m3, quantised along d
  void const* gmem_w_down_t_scales;    // (E,scale_atom_bytes(n, d/32))
  float const* gmem_scores;            // (P) by slot
  int32_t const* gmem_sort_permutation;  // (P) row -> slot
  void const* gmem_h;                    // (P,2n) e4m3
  void const* gmem_h_scales;             // (P,2n/32)
  Activation activation;                 // swiglu
  void* gmem_dh;                         // (P,2n) bf16
  void* gmem_dh8;                        // (P,2n) e4m3; may be gmem_h
  void* gmem_dh8_scales;                 // (P,2n/32); where gmem_dh8 is gmem_h, gmem_h_scales
  void* gmem_a_scaled;                   // (P,n) bf16
  float* gmem_ds_partials;               // (P,n/128) by row: sums over 128 columns
  int64_t rows;                          // P >= R
  int64_t hidden, intermediate;          // d, n: multiples of 128
  int32_t experts;                       // E
  int32_t* gmem_tile_counter;            // one int, 0 before and after every launch
};
cudaError_t launch_down_projection_dgrad_mxfp8(DownProjectionDgradMxfp8Arguments const& args,
                                               int sm_count, cudaStream_t stream);

/// dx row r = rnd(dh8_r w8_up[e]) of the dequantised operands, the sum over both halves.
struct UpProjectionDgradMxfp8Arguments {
  void const* gmem_dh;                 // (P,2n) e4m3 as [gate half | up half]
  void const* gmem_dh_scales;          // (P,2n/32)
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_up_t;             // (E,d,2n) e4m3, quantised along n
  void const* gmem_w_up_t_scales;      // (E,scale_atom_bytes(d, 2n/32))
  void* gmem_dx_rows;                  // (P,d) bf16
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n: multiples of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_up_projection_dgrad_mxfp8(UpProjectionDgradMxfp8Arguments const& args,
                                             int sm_count, cudaStream_t stream);

}  // namespace tessera::cuda
