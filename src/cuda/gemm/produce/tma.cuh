// SPDX-License-Identifier: Apache-2.0
// The producer of a GEMM whose operands both come by TMA.
#pragma once

#include "../handover.cuh"
#include "lend.cuh"
#include "load_tile.cuh"
#include "outer_product.cuh"

namespace tessera::cuda::gemm {

// One warp; one of its lanes issues both operands.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void produce_by_tma(SharedStorage<kGemm>& smem, GemmParams const& p,
                                               typename Epilogue::Params const& epilogue_params) {
  bool const schedules =
      !kGemm.schedules_apart() && (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p);
  WorkQueue<kGemm, true> queue(smem);
  TakesOver<kGemm> handover(p);
  PipelineState<kGemm> state;
  WorkTile tile;
  if (schedules) scheduler.announce_first(p.k_tiles);
  while (queue.read(tile)) {
    if constexpr (kGemm.takes_over()) handover.wait(tile);
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    // The first of a run's last two tiles always has rows.
    bool const last = !kGemm.keeps_b() || tile.run_left == 1;
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      if (schedules && last) scheduler.step(k_tile, k_tiles);
      if constexpr (kGemm.keeps_b()) {
        if (tile.in_run == 0) load_resident_b<kGemm>(smem, p, k_tile, tile);
      }
      wait_empty<kGemm>(smem, state);
      if (arch::elect_one()) {
        if (kGemm.schedules_apart() && TileScheduler<kGemm>::draws_at(k_tile, k_tiles)) {
          arch::mbarrier_arrive(&smem.draw);
        }
        arch::Mbarrier* const full = &smem.full[state.stage];
        uint32_t const b_bytes = kGemm.keeps_b() ? 0 : b_bytes_of<kGemm>(p, tile);
        arch::mbarrier_arrive_expect_tx(full, kGemm.a_tile_bytes() + b_bytes);
        load_a<kGemm>(smem, p, state.stage, k_tile, tile);
        if (!kGemm.keeps_b()) load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      state.advance();
    }
    if constexpr (kGemm.epilogue.outer_product) load_outer_product<kGemm>(smem, p, state, tile);
    lend_stages<kGemm, Epilogue>(smem, epilogue_params, state, tile);
  }
  if constexpr (kGemm.takes_over()) handover.at_end();
}

}  // namespace tessera::cuda::gemm
