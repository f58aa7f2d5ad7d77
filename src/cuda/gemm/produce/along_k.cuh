// SPDX-License-Identifier: Apache-2.0
// The producers of a GEMM along k (varlen-K), which gathers tokens of A.
#pragma once

#include "../handover.cuh"
#include "../scheduler.cuh"
#include "../tile_extent.cuh"
#include "gather_tokens.cuh"
#include "lend.cuh"
#include "lets_next_start.cuh"
#include "load_tile.cuh"

namespace tessera::cuda::gemm {

// Produces the tiles of a varlen-K GEMM, whose every k_tile has tokens of its own.
template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void produce_along_k(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                typename Epilogue::Params const& epilogue_params) {
  bool const schedules = kFirstWarp && (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p);
  WorkQueue<kGemm, kFirstWarp> queue(smem);
  TokenGather<kGemm> gather(p);
  PipelineState<kGemm> state;
  PipelineState<kGemm> behind;
  PipelineState<kGemm>& b_state = kGemm.b_behind() ? behind : state;
  TakesOver<kGemm> handover(p);
  LetsNextStart<kGemm, kFirstWarp> next(p);
  WorkTile tile;
  // In turns, counted from the end: not the first warp's where it announces a tile, four k_tiles before.
  auto const fills_b = [warp = arch::warp_idx() % 4](int k_tiles_left) {
    return warp == static_cast<int>(static_cast<uint32_t>(k_tiles_left + 2) % 4);
  };
  auto const fill_b = [&](int k_tile, int k_tiles) {
    if (fills_b(k_tiles - k_tile) && arch::elect_one()) {
      GatheredStage<kGemm>::fill_b(smem, p, b_state.stage, b_state.b_stage(), k_tile, tile);
    }
    __syncwarp();
    if constexpr (kGemm.b_behind()) b_state.advance();
  };
  if (schedules) scheduler.announce_first(0);
  while (queue.read(tile)) {
    if constexpr (kGemm.takes_over()) handover.wait(tile);
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    gather.begin(tile);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      if (schedules) scheduler.step(k_tile, k_tiles);
      next.count_k_tile();
      gather.prepare(tile, k_tile);
      wait_empty<kGemm>(smem, state);
      if (!kGemm.b_behind()) {
        fill_b(k_tile, k_tiles);
      } else if (k_tile > 0) {
        fill_b(k_tile - 1, k_tiles);
      }
      gather.copy(smem, state.stage, k_tile);
      state.advance();
    }
    if constexpr (kGemm.b_behind()) {
      if (fills_b(1)) wait_empty<kGemm>(smem, state);
      fill_b(k_tiles - 1, k_tiles);
    }
    lend_stages<kGemm, Epilogue>(smem, epilogue_params, state, tile);
  }
  if constexpr (kGemm.takes_over()) handover.at_end();
  next.at_end();
}

}  // namespace tessera::cuda::gemm
