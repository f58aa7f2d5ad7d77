// SPDX-License-Identifier: Apache-2.0
// The producers of a GEMM that gathers rows of A.
#pragma once

#include "../scheduler.cuh"
#include "gather_rows.cuh"
#include "lend.cuh"
#include "load_tile.cuh"

namespace tessera::cuda::gemm {

// Four warps gather A. In each k_tile one of them, in turns, issues B before its share of A.
template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void produce_by_gather(
    SharedStorage<kGemm>& smem, GemmParams const& p,
    typename Epilogue::Params const& epilogue_params) {
  constexpr int kReadAhead = 2;  // k_tiles before the end: requests the next tile's row indices
  bool const schedules = kFirstWarp && (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p);
  WorkQueue<kGemm, kFirstWarp> queue(smem);
  RowGather<kGemm> gather(p);
  PipelineState<kGemm> state;
  int const warp = arch::warp_idx() % 4;
  WorkTile tile;
  WorkTile ahead;
  if (schedules) scheduler.announce_first(p.k_tiles);
  bool more = queue.read(tile);
  if (more) gather.prefetch(tile);
  while (more) {
    gather.begin();
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      if (schedules) scheduler.step(k_tile, p.k_tiles);
      if (k_tile == max(p.k_tiles - kReadAhead, 0)) {
        more = queue.read(ahead);
        if (more) gather.prefetch(ahead);
      }
      wait_empty<kGemm>(smem, state);
      if (warp == k_tile % 4 && arch::elect_one()) {
        arch::mbarrier_arrive_expect_tx(&smem.full[state.stage], b_bytes_of<kGemm>(p, tile));
        load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      gather.copy(smem, state.stage, tile.rows);
      state.advance();
    }
    lend_stages<kGemm, Epilogue>(smem, epilogue_params, state, tile);
    tile = ahead;
  }
}

}  // namespace tessera::cuda::gemm
