// SPDX-License-Identifier: Apache-2.0
// The producer warp whose operands all come by TMA: its loop, and what a GEMM loads in it.
#pragma once

#include <concepts>

#include "../handover.cuh"
#include "../scheduler.cuh"
#include "../tile_extent.cuh"
#include "lend.cuh"
#include "load_tile.cuh"
#include "outer_product.cuh"

namespace tessera::cuda::gemm {

// A policy says what a producer warp loads for its tiles. Every hook is called by the converged warp, but for fill().
//   announce_first()              comes once, before the first tile is read
//   begin(tile)                   comes when a tile was read, which it may change; returns the tile's number of k_tiles
//   before(tile, k_tile, k_tiles) comes before the warp waits for a free stage
//   loads()                       says of one lane that it calls fill()
//   fill(stage, tile, k_tile, k_tiles)  has the k_tile loaded into the stage, and arrives on full[stage]
//   after(ring, tile)             takes the stages that the tile needs behind its k_tiles
//   end()                         comes after the last tile
template <class L, class Ring>
concept LoadsTiles = requires(L& load, WorkTile& tile, Ring& ring, int i) {
  { load.announce_first() } -> std::same_as<void>;
  { load.begin(tile) } -> std::same_as<int>;
  { load.before(tile, i, i) } -> std::same_as<void>;
  { L::loads() } -> std::same_as<bool>;
  { load.fill(i, tile, i, i) } -> std::same_as<void>;
  { load.after(ring, tile) } -> std::same_as<void>;
  { load.end() } -> std::same_as<void>;
};

// Fills the stages of all tiles of the work queue.
template <GemmConfig kGemm, LoadsTiles<PipelineState<kGemm>> LoadTile>
__device__ __forceinline__ void produce_tiles(SharedStorage<kGemm>& smem, LoadTile& load) {
  WorkQueue<kGemm, true> queue(smem);
  PipelineState<kGemm> state;
  WorkTile tile;
  load.announce_first();
  while (queue.read(tile)) {
    int const k_tiles = load.begin(tile);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      load.before(tile, k_tile, k_tiles);
      wait_empty<kGemm>(smem, state);
      if (LoadTile::loads()) load.fill(state.stage, tile, k_tile, k_tiles);
      __syncwarp();
      state.advance();
    }
    load.after(state, tile);
  }
  load.end();
}

// Both operands of a GEMM, by one lane.
template <GemmConfig kGemm, class Epilogue>
class TmaTiles {
 public:
  __device__ __forceinline__ TmaTiles(SharedStorage<kGemm>& smem, GemmParams const& p,
                                      typename Epilogue::Params const& epilogue_params)
      : smem_(smem),
        p_(p),
        epilogue_params_(epilogue_params),
        schedules_(!kGemm.schedules_apart() &&
                   (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0)),
        scheduler_(smem, p),
        handover_(p) {}

  __device__ __forceinline__ void announce_first() {
    if (schedules_) scheduler_.announce_first(p_.k_tiles);
  }
  __device__ __forceinline__ int begin(WorkTile const& tile) {
    if constexpr (kGemm.takes_over()) handover_.wait(tile);
    return k_tiles_of<kGemm>(p_, tile);
  }
  __device__ __forceinline__ void before(WorkTile const& tile, int k_tile, int k_tiles) {
    // The first of a run's last two tiles always has rows.
    bool const last = !kGemm.keeps_b() || tile.run_left == 1;
    if (schedules_ && last) scheduler_.step(k_tile, k_tiles);
    if constexpr (kGemm.keeps_b()) {
      if (tile.in_run == 0) load_resident_b<kGemm>(smem_, p_, k_tile, tile);
    }
  }
  __device__ __forceinline__ static bool loads() { return arch::elect_one(); }
  __device__ __forceinline__ void fill(int stage, WorkTile const& tile, int k_tile, int k_tiles) {
    if (kGemm.schedules_apart() && TileScheduler<kGemm>::draws_at(k_tile, k_tiles)) {
      arch::mbarrier_arrive(&smem_.draw);
    }
    arch::Mbarrier* const full = &smem_.full[stage];
    uint32_t const b_bytes = kGemm.keeps_b() ? 0 : b_bytes_of<kGemm>(p_, tile);
    arch::mbarrier_arrive_expect_tx(full, kGemm.a_tile_bytes() + b_bytes);
    load_a<kGemm>(smem_, p_, stage, k_tile, tile);
    if (!kGemm.keeps_b()) load_b<kGemm>(smem_, p_, stage, k_tile, tile);
  }
  __device__ __forceinline__ void after(PipelineState<kGemm>& state, WorkTile const& tile) {
    if constexpr (kGemm.epilogue.outer_product) load_outer_product<kGemm>(smem_, p_, state, tile);
    lend_stages<kGemm, Epilogue>(smem_, epilogue_params_, state, tile);
  }
  __device__ __forceinline__ void end() {
    if constexpr (kGemm.takes_over()) handover_.at_end();
  }

 private:
  SharedStorage<kGemm>& smem_;
  GemmParams const& p_;
  typename Epilogue::Params const& epilogue_params_;
  bool const schedules_;
  TileScheduler<kGemm> scheduler_;
  TakesOver<kGemm> handover_;
};

// Produces the tiles of a GEMM, by one warp.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void produce_by_tma(SharedStorage<kGemm>& smem, GemmParams const& p,
                                               typename Epilogue::Params const& epilogue_params) {
  TmaTiles<kGemm, Epilogue> tiles(smem, p, epilogue_params);
  produce_tiles<kGemm>(smem, tiles);
}

}  // namespace tessera::cuda::gemm
