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

template <GemmConfig kGemm>
class StoreFp32Epilogue {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreFp32Params;

  __device__ __forceinline__ StoreFp32Epilogue(SharedStorage<kGemm>&, Params const& p, int)
      : p_(p) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    row_ = thread / arch::kWarpThreads * 16 + arch::lane_idx() / 4;
    column_ = arch::lane_idx() % 4 * 2;
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`.
  __device__ __forceinline__ void store(Accumulators<kGemm> const& acc, WorkTile const& tile,
                                        int row) const {
    int const first = tile.n_tile * kGemm.tile.n + column_;
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      TESSERA_UNROLL
      for (int j = 0; j < kGroupColumns / 8; ++j) {
        int const c = first + g * kGroupColumns + 8 * j;
        float2 const bias = {bias_of(c), bias_of(c + 1)};
        TESSERA_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const r = row + row_ + 8 * half;
          float const* const value = &acc[g][4 * j + 2 * half];
          if (r < tile.end)
            put(int64_t{r} * p_.columns + c, c, value[0] + bias.x, value[1] + bias.y);
        }
      }
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
  int row_;     // of the thread, among 64
  int column_;  // among 8
};

}  // namespace tessera::cuda::gemm
