// SPDX-License-Identifier: Apache-2.0
// The producer's half of an outer product (sm90/outer_product.cuh) loads rows of v, which are B of one more k16 step.
#pragma once

#include "../../arch/mbarrier.cuh"
#include "../../arch/tma.cuh"
#include "../params.hpp"
#include "../ring.cuh"
#include "../work_tile.hpp"

namespace tessera::cuda::gemm {

constexpr int kOuterRows = 8;                         // of v, in each of two groups
constexpr int kOuterBox = kOuterRows * kSlabColumns;  // elements
constexpr int kOuterGroup = 256 / kSlabColumns * kOuterBox;

// The producer's warp calls it.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_outer_product(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                   PipelineState<kGemm>& state,
                                                   WorkTile const& tile) {
  wait_empty<kGemm>(smem, state);
  if (arch::elect_one()) {
    arch::Mbarrier* const full = &smem.full[state.stage];
    arch::mbarrier_arrive_expect_tx(full, 2 * kOuterGroup * sizeof(bf16));
    for (int box = 0; box < 2 * kGemm.tile.n / kSlabColumns; ++box) {
      int const column = tile.n_tile * kGemm.tile.n + box * kSlabColumns % kGemm.tile.n;
      arch::tma_load(&smem.b[state.stage][box * kOuterBox], &p.v, full, column,
                     tile.segment * p.v_rows);
    }
  }
  __syncwarp();
  state.advance();
}

}  // namespace tessera::cuda::gemm
