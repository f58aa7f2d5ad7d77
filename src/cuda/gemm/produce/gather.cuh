// SPDX-License-Identifier: Apache-2.0
// The producers of a GEMM that gathers rows of A: their loop, and what a GEMM loads in it.
#pragma once

#include <concepts>

#include "../await_rows.cuh"
#include "../scheduler.cuh"
#include "gather_rows.cuh"
#include "lend.cuh"
#include "load_tile.cuh"

namespace tessera::cuda::gemm {

// A policy says what the four warps of a producer load for its tiles. All their threads call every hook but fill_b().
//   prefetch(tile)                comes a tile ahead: requests which rows of A the tile has
//   begin()                       comes before the first k_tile of the tile that was prefetched
//   fill_b(stage, tile, k_tile)   is called by one thread: arrives on full[stage] and has B loaded
//   copy(stage, tile)             copies this thread's share of the next k_tile of A, and arrives on full[stage]
//   after(ring, tile)             takes the stages that the tile needs behind its k_tiles
template <class G, class Ring>
concept GathersTiles = requires(G& gather, WorkTile const& tile, Ring& ring, int i) {
  { gather.prefetch(tile) } -> std::same_as<void>;
  { gather.begin() } -> std::same_as<void>;
  { gather.fill_b(i, tile, i) } -> std::same_as<void>;
  { gather.copy(i, tile) } -> std::same_as<void>;
  { gather.after(ring, tile) } -> std::same_as<void>;
};

// Four warps gather A. In each k_tile one of them, in turns, issues B before its share of A.
template <GemmConfig kGemm, bool kFirstWarp, GathersTiles<PipelineState<kGemm>> GatherTile,
          class Storage, class Params>
__device__ __forceinline__ void gather_tiles(Storage& smem, GemmParams const& p,
                                             Params const& params) {
  constexpr int kReadAhead = 2;  // k_tiles before the end: requests the next tile's row indices
  bool const schedules = kFirstWarp && (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p);
  WorkQueue<kGemm, kFirstWarp> queue(smem);
  GatherTile gather(smem, p, params);
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
      if (warp == k_tile % 4 && arch::elect_one()) gather.fill_b(state.stage, tile, k_tile);
      __syncwarp();
      gather.copy(state.stage, tile);
      state.advance();
    }
    gather.after(state, tile);
    tile = ahead;
  }
}

// Loads rows of A by their indices, and B by TMA.
template <GemmConfig kGemm, class Epilogue>
class GatheredTiles {
 public:
  __device__ __forceinline__ GatheredTiles(SharedStorage<kGemm>& smem, GemmParams const& p,
                                           typename Epilogue::Params const& epilogue_params)
      : smem_(smem), p_(p), epilogue_params_(epilogue_params), rows_(p), arrivals_(p) {}

  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    rows_.prefetch(tile);
    if constexpr (kGemm.order.ready_first) awaits_rows_ = tile.awaits_rows;
  }
  __device__ __forceinline__ void begin() {
    if constexpr (kGemm.order.ready_first) arrivals_.wait(awaits_rows_);
    rows_.begin();
  }
  __device__ __forceinline__ void fill_b(int stage, WorkTile const& tile, int k_tile) {
    GatheredStage<kGemm>::fill_b(smem_, p_, stage, stage, k_tile, tile);
  }
  __device__ __forceinline__ void copy(int stage, WorkTile const& tile) {
    rows_.copy(smem_, stage, tile.rows);
  }
  __device__ __forceinline__ void after(PipelineState<kGemm>& state, WorkTile const& tile) {
    lend_stages<kGemm, Epilogue>(smem_, epilogue_params_, state, tile);
  }

 private:
  SharedStorage<kGemm>& smem_;
  GemmParams const& p_;
  typename Epilogue::Params const& epilogue_params_;
  RowGather<kGemm> rows_;
  AwaitsRows arrivals_;       // ready_first
  bool awaits_rows_ = false;  // of the tile that was prefetched
};

template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void produce_by_gather(
    SharedStorage<kGemm>& smem, GemmParams const& p,
    typename Epilogue::Params const& epilogue_params) {
  gather_tiles<kGemm, kFirstWarp, GatheredTiles<kGemm, Epilogue>>(smem, p, epilogue_params);
}

}  // namespace tessera::cuda::gemm
