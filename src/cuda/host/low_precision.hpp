// SPDX-License-Identifier: Apache-2.0
// FP8 on Hopper: the quantisers, and the GEMMs that read and write e4m3 in blocks (docs/numerics.md#fp8-and-mxfp8).
// Host side: the calls' arguments and launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "projection.hpp"
#include "tessera/low_precision.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

constexpr int kScaleBlock =
    128;  // elements that share a scale; in weights, rows as well (gemm::kScaleBlock)

/// codes and scales of x, in blocks of 1 x 128: those of tessera::quantise() with QuantiseBlock::row_128 and
/// ScaleLayout::matrix, byte for byte.
struct QuantiseRowsArguments {
  void const* gmem_x;   // (rows,width) bf16, 16-byte aligned
  int64_t rows, width;  // width: a multiple of 128
  int64_t pitch;        // elements from row to row, a multiple of 8
  bool pow2 = false;    // ScaleRule::pow2, else fp32
  void* gmem_codes;     // (rows,width) e4m3, 8-byte aligned
  float* gmem_scales;   // (rows,width/128)
};
cudaError_t launch_quantise_rows(QuantiseRowsArguments const& args, cudaStream_t stream);

/// The way back: codes times scales, rounded to bf16, as tessera::dequantise() gives them but for codes of NaN, which
/// quantisers leave under scales of NaN alone.
struct DequantiseRowsArguments {
  void const* gmem_codes;  // (rows,width) e4m3, 16-byte aligned; width: a multiple of 128
  float const*
      gmem_scales;  // of row r and a block of 128 columns: r * row_step + block * block_step
  int64_t row_step, block_step;
  int64_t rows, width;
  int32_t const* gmem_num_rows;  // rows from there on: neither read nor written; null: all are
  void* gmem_values;             // (rows,width) bf16, 16-byte aligned
};
cudaError_t launch_dequantise_rows(DequantiseRowsArguments const& args, cudaStream_t stream);

/// The same of weights in blocks of 128 x 128, as tessera::quantise_weights() gives those of either projection.
struct QuantiseWeightsArguments {
  /// gate and up, or the one matrix: `rows` rows of `width`, of one orientation. Strides and bases are multiples of 16
  /// bytes; rows that are not contiguous lie in one block.
  WeightRows w[2];
  int64_t rows, width;  // multiples of 128; up: n, d; down: d, n
  int32_t halves;       // matrices of an expert; up: 2, down: 1
  int32_t experts;      // E
  bool pow2 = false;
  void* gmem_codes;              // (E,halves,rows,width) e4m3; null: not stored, as are the others
  void* gmem_codes_t = nullptr;  // (E,width,halves*rows) e4m3, the same codes
  float* gmem_scales;            // (E,rows/128,width/128,halves)
  float* gmem_scales_t = nullptr;  // (E,width/128,halves*rows/128), the same scales
};
cudaError_t launch_quantise_weights(QuantiseWeightsArguments const& args, cudaStream_t stream);

/// Scales of weights as those of the transposed codes.
struct TurnScalesArguments {
  float const* gmem_scales;  // (E,down,across,halves): of blocks of rows, of columns
  float* gmem_scales_t;      // (E,across,halves*down)
  int64_t down, across;
  int32_t halves, experts;
};
cudaError_t launch_turn_scales(TurnScalesArguments const& args, cudaStream_t stream);

/// Contiguous matrices (E,halves,rows,width), half by half.
inline WeightRows contiguous_half(void const* gmem, int halves, int half, int64_t rows,
                                  int64_t width) noexcept {
  return {.gmem = static_cast<uint16_t const*>(gmem) + half * rows * width,
          .expert_stride = halves * rows * width,
          .row_stride = width,
          .column_stride = 1,
          .block = rows};
}

/// hb_r = rnd(x8[gather_index[r]] w8_up[e]^T) of the dequantised operands, a_r = act(hb_r), for rows r of expert e. h
/// is [gate half | up half]. An output that is null is not stored.
struct UpProjectionFwdE4m3Arguments {
  void const* gmem_x;                  // (T,d) e4m3
  float const* gmem_x_scales;          // (T,d/128)
  int32_t const* gmem_gather_index;    // (P) row -> row of x; null: row r of x
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_up;               // (E,2,n,d) e4m3
  float const* gmem_w_up_scales;       // (E,n/128,d/128,2)
  Activation activation;               // swiglu
  // e4m3: (P,2n) and (P,n) codes, of hb and of a before it is rounded, with scales of 1 x 128 as rows of sorted tensors
  // have them, (2n/128,P4) and (n/128,P4), P4 = padded_scale_rows(P). bf16: (P,2n) and (P,n), and no scales.
  void* gmem_h;
  void* gmem_a;
  float* gmem_h_scales;
  float* gmem_a_scales;
  int64_t rows;                  // P >= R
  int64_t hidden, intermediate;  // d, n: multiples of 128
  int32_t experts;               // E
  int32_t* gmem_tile_counter;    // one int, 0 before and after every launch
};
cudaError_t launch_up_projection_fwd_e4m3(UpProjectionFwdE4m3Arguments const& args, int sm_count,
                                          cudaStream_t stream);
/// The same with h and a in bf16.
cudaError_t launch_up_projection_fwd_e4m3_to_bf16(UpProjectionFwdE4m3Arguments const& args,
                                                  int sm_count, cudaStream_t stream);

/// y_r = rnd(a8_r w8_down[e]^T) of the dequantised operands.
struct DownProjectionFwdE4m3Arguments {
  void const* gmem_a;                  // (P,n) e4m3
  float const* gmem_a_scales;          // (n/128,P4)
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_down;             // (E,d,n) e4m3
  float const* gmem_w_down_scales;     // (E,d/128,n/128)
  void* gmem_y;                        // (P,d) bf16
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n: multiples of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_down_projection_fwd_e4m3(DownProjectionFwdE4m3Arguments const& args,
                                            int sm_count, cudaStream_t stream);

/// t_r = rnd(dO8[gather_index[r]] w8_down[e]) of the dequantised operands, never stored; with h_r the values of the
/// codes and s the score of row r: ds_r = <t_r, act(h_r)>, dh_r = rnd(J_act(h_r)^T s t_r), dh8_r the codes of that,
/// a'_r = rnd(s act(h_r)). h and dh are [gate half | up half]. An output that is null is not stored.
struct DownProjectionDgradE4m3Arguments {
  void const* gmem_d_o;                // (T,d) e4m3
  float const* gmem_d_o_scales;        // (T,d/128)
  int32_t const* gmem_gather_index;    // (P) row -> row of d_o; null: row r of d_o
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_down_t;           // (E,n,d) e4m3
  float const* gmem_w_down_t_scales;   // (E,n/128,d/128)
  float const* gmem_scores;            // (P) by slot
  int32_t const* gmem_sort_permutation;  // (P) row -> slot
  void const* gmem_h;                    // (P,2n) e4m3
  float const* gmem_h_scales;            // (2n/128,P4)
  Activation activation;                 // swiglu
  void* gmem_dh;                         // (P,2n) bf16
  void* gmem_dh8;                        // (P,2n) e4m3; may be gmem_h
  float* gmem_dh8_scales;                // (2n/128,P4); where gmem_dh8 is gmem_h, gmem_h_scales
  void* gmem_a_scaled;                   // (P,n) bf16
  float* gmem_ds_partials;               // (P,n/128) by row: sums over 128 columns
  int64_t rows;                          // P >= R
  int64_t hidden, intermediate;          // d, n: multiples of 128
  int32_t experts;                       // E
  int32_t* gmem_tile_counter;            // one int, 0 before and after every launch
};
cudaError_t launch_down_projection_dgrad_e4m3(DownProjectionDgradE4m3Arguments const& args,
                                              int sm_count, cudaStream_t stream);

/// dx row r = rnd(dh8_r w8_up[e]) of the dequantised operands, the sum over both halves.
struct UpProjectionDgradE4m3Arguments {
  void const* gmem_dh;                 // (P,2n) e4m3 as [gate half | up half]
  float const* gmem_dh_scales;         // (2n/128,P4)
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  void const* gmem_w_up_t;             // (E,d,2n) e4m3
  float const* gmem_w_up_t_scales;     // (E,d/128,2n/128)
  void* gmem_dx_rows;                  // (P,d) bf16
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n: multiples of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_up_projection_dgrad_e4m3(UpProjectionDgradE4m3Arguments const& args,
                                            int sm_count, cudaStream_t stream);

}  // namespace tessera::cuda
