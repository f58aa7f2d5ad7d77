// SPDX-License-Identifier: Apache-2.0
// Adds a bias to 64 columns of accumulators.
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

// Adds it to the slab of the accumulators whose first column is `column` of so many.
template <class Accumulators>
__device__ __forceinline__ void add_bias(Accumulators& acc, int slab, Bias const& bias, int segment,
                                         int column, int columns) {
  bf16 const* gmem = bias.gmem + segment * bias.segment_stride +
                     int64_t{Accumulators::column(column)} * bias.column_stride;
  acc.for_each_columns(slab, column, [&](int c, auto rows) {
    TESSERA_UNROLL
    for (int bit = 0; bit < 2; ++bit) {
      float const b = arch::load_bf16(gmem + bit * bias.column_stride, c + bit < columns);
      rows(0, [&](int, float& left, float& right) { (bit == 0 ? left : right) += b; });
    }
    gmem += Accumulators::kColumnStep * bias.column_stride;
  });
}

// Adds both to two slabs from `slab` on, whose columns are of both halves in turn, from `column` on of each.
template <class Accumulators>
__device__ __forceinline__ void add_interleaved_bias(Accumulators& acc, int slab,
                                                     Bias const (&bias)[2], int segment, int column,
                                                     int columns) {
  TESSERA_UNROLL
  for (int half = 0; half < 2; ++half) {
    bf16 const* gmem = bias[half].gmem + segment * bias[half].segment_stride +
                       int64_t{Accumulators::column_pair(column)} * bias[half].column_stride;
    acc.for_each_column_pair(slab, 2, column, [&](int c, auto rows) {
      float const b = arch::load_bf16(gmem, c < columns);
      rows(0, [&](int, float& left, float& right) { (half == 0 ? left : right) += b; });
      gmem += Accumulators::kColumnPairStep * bias[half].column_stride;
    });
  }
}

}  // namespace tessera::cuda::gemm
