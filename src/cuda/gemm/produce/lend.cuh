// SPDX-License-Identifier: Apache-2.0
// The producer's half of stages that it lends to a tile's epilogue (sm90/lent.cuh).
#pragma once

#include "../../arch/mbarrier.cuh"
#include "../../arch/warp.cuh"
#include "../ring.cuh"
#include "../work_tile.hpp"

namespace tessera::cuda::gemm {

// Lends `stages` stages behind the k_tiles of `tile`. Every thread of the warps that fill stages calls it.
// Epilogue::lend() fills a stage as the producer fills others: it arrives on the stage's full barrier with the number
// of bytes that the barrier has to wait for.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void lend_stages(SharedStorage<kGemm>& smem,
                                            typename Epilogue::Params const& p,
                                            PipelineState<kGemm>& state, WorkTile const& tile,
                                            int stages = kGemm.epilogue.lent_stages) {
  constexpr int kWarps = kGemm.gathers() ? 4 : 1;
  if constexpr (kGemm.lends()) {
    for (int i = 0; i < stages; ++i) {
      wait_empty<kGemm>(smem, state);
      if (arch::warp_idx() % kWarps == i % kWarps && arch::elect_one()) {
        Epilogue::lend(smem, p, state.stage, tile, i);
      }
      __syncwarp();
      if constexpr (kGemm.gathers()) arch::mbarrier_arrive(&smem.full[state.stage]);
      state.advance();
    }
  }
}

}  // namespace tessera::cuda::gemm
