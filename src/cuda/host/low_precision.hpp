// SPDX-License-Identifier: Apache-2.0
// FP8 on Hopper: the quantisers, and the GEMMs that read and write e4m3 in blocks (docs/numerics.md#fp8-and-mxfp8).
// Host side: the calls' arguments and launchers. The layer does not call them yet.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tessera/low_precision.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

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

/// The same of weights in blocks of 128 x 128, as tessera::quantise_weights() gives those of either projection.
struct QuantiseWeightsArguments {
  void const* gmem_w;   // (E,halves,rows,width) bf16, contiguous; rows and width multiples of 128
  int64_t rows, width;  // up: n, d; down: d, n
  int32_t halves;       // up: 2, down: 1
  int32_t experts;      // E
  bool pow2 = false;
  void* gmem_codes;    // (E,halves,rows,width) e4m3
  float* gmem_scales;  // (E,rows/128,width/128,halves)
};
cudaError_t launch_quantise_weights(QuantiseWeightsArguments const& args, cudaStream_t stream);

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
  int64_t hidden, intermediate;        // d: a multiple of 256, n: of 128
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
};
cudaError_t launch_down_projection_fwd_e4m3(DownProjectionFwdE4m3Arguments const& args,
                                            int sm_count, cudaStream_t stream);

}  // namespace tessera::cuda
