// SPDX-License-Identifier: Apache-2.0
// Warps that gather A report a stage, and fill its B, in one of two ways.
#pragma once

#include "../tile_extent.cuh"
#include "load_tile.cuh"

namespace tessera::cuda::gemm {

// Both are reported to the stage's full barrier. Pairs of sm_100a have other ways (sm100/pair_loads.cuh).
template <GemmConfig kGemm>
struct GatheredStage {
  // Every gathering thread arrives at this barrier.
  __device__ __forceinline__ static arch::Mbarrier* rows(SharedStorage<kGemm>& smem, int stage) {
    return &smem.full[stage];
  }
  // One thread calls it: has B loaded into buffer `b_stage`.
  __device__ __forceinline__ static void fill_b(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                int stage, int b_stage, int k_tile,
                                                WorkTile const& tile) {
    arch::Mbarrier* const full = &smem.full[stage];
    arch::mbarrier_arrive_expect_tx(full, b_bytes_of<kGemm>(p, tile));
    load_b_to<kGemm>(smem, p, b_stage, full, k_tile, tile);
  }
};

}  // namespace tessera::cuda::gemm
