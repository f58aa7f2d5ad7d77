// SPDX-License-Identifier: Apache-2.0
// store_fp32 epilogue: D = accumulators (+ bias of the column), fp32, straight from the registers: four
// lanes fill a 32-byte sector. For small D.
#pragma once

#include <cuda_bf16.h>

#include "../arch/warp.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/storage.cuh"

namespace tessera::cuda::gemm {

struct StoreFp32Params {
  float* gmem;            // (rows, columns)
  void const* gmem_bias;  // (columns), fp32 with b_terms, else bf16; null: none
  int columns;
  bool in_pairs;  // pairs of columns are 8-byte aligned
};

template <class Core>
class StoreFp32Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreFp32Params;

  __device__ __forceinline__ StoreFp32Epilogue(typename Core::Storage&, Params const& p, int)
      : p_(p) {}

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`.
  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int row) const {
    int const first = tile.n_tile * kGemm.tile.n;
    TESSERA_UNROLL
    for (int slab = 0; slab < Accumulators::kSlabs; ++slab) {
      acc.for_each_columns(slab, first + slab * kSlabColumns, [&](int c, auto rows) {
        float2 const bias = {bias_of(c), bias_of(c + 1)};
        rows(row, [&](int r, float left, float right) {
          if (r < tile.end) put(int64_t{r} * p_.columns + c, c, left + bias.x, right + bias.y);
        });
      });
    }
    __syncwarp();
  }

  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void drain() const {}

 private:
  __device__ __forceinline__ float bias_of(int c) const {
    if (p_.gmem_bias == nullptr || c >= p_.columns) return 0.0f;
    if constexpr (kGemm.b_terms() == 1) {
      return __bfloat162float(static_cast<bf16 const*>(p_.gmem_bias)[c]);
    } else {
      return static_cast<float const*>(p_.gmem_bias)[c];
    }
  }

  __device__ __forceinline__ void put(int64_t offset, int c, float first, float second) const {
    if (p_.in_pairs) {
      if (c < p_.columns) *reinterpret_cast<float2*>(p_.gmem + offset) = {first, second};
    } else {
      if (c < p_.columns) p_.gmem[offset] = first;
      if (c + 1 < p_.columns) p_.gmem[offset + 1] = second;
    }
  }

  Params const& p_;
};

}  // namespace tessera::cuda::gemm
