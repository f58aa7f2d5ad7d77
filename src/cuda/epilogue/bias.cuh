// SPDX-License-Identifier: Apache-2.0
// Adds a bias to 64 columns of a thread's accumulators (fragment order: arch/sm90/wgmma.cuh).
#pragma once

#include "../arch/load_global.cuh"
#include "../arch/warp.cuh"
#include "../gemm/storage.cuh"

namespace tessera::cuda::gemm {

// Element c of segment s: gmem[s*segment_stride + c*column_stride]. gmem null: no bias.
struct Bias {
  bf16 const* gmem;
  int64_t segment_stride;
  int column_stride;
};

// acc[4j + ..] holds columns column + 8j + 2(lane%4) + {0,1} of two rows, j < 8.
template <int kFirst, int kSize>
__device__ __forceinline__ void add_bias(float (&acc)[kSize], Bias const& bias, int segment,
                                         int column, int columns) {
  int const first = column + arch::lane_idx() % 4 * 2;
  bf16 const* gmem =
      bias.gmem + segment * bias.segment_stride + int64_t{first} * bias.column_stride;
  TESSERA_UNROLL
  for (int j = 0; j < kSlabColumns / 8; ++j) {
    TESSERA_UNROLL
    for (int bit = 0; bit < 2; ++bit) {
      float const b =
          arch::load_bf16(gmem + bit * bias.column_stride, first + 8 * j + bit < columns);
      acc[kFirst + 4 * j + bit] += b;
      acc[kFirst + 4 * j + 2 + bit] += b;
    }
    gmem += 8 * bias.column_stride;
  }
}

// The same to 128 columns of both halves in turn, 64 of each from `column` on.
template <int kSize>
__device__ __forceinline__ void add_interleaved_bias(float (&acc)[kSize], Bias const (&bias)[2],
                                                     int segment, int column, int columns) {
  int const first = column + arch::lane_idx() % 4;
  TESSERA_UNROLL
  for (int half = 0; half < 2; ++half) {
    bf16 const* gmem = bias[half].gmem + segment * bias[half].segment_stride +
                       int64_t{first} * bias[half].column_stride;
    TESSERA_UNROLL
    for (int j = 0; j < kGroupColumns / 8; ++j) {
      float const b = arch::load_bf16(gmem, first + 4 * j < columns);
      acc[4 * j + half] += b;
      acc[4 * j + 2 + half] += b;
      gmem += 4 * bias[half].column_stride;
    }
  }
}

}  // namespace tessera::cuda::gemm
