// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: draws work tiles and fills the stages of each, A by TMA or by gather, B by
// TMA, multicast to the cluster. With schedules_apart a second warp draws.
#pragma once

#include "../../arch/cluster.cuh"
#include "../../arch/setmaxnreg.cuh"
#include "../../arch/tma.cuh"
#include "../handover.cuh"
#include "../params.hpp"
#include "../ring.cuh"
#include "../scheduler.cuh"
#include "gather.cuh"
#include "lend.cuh"
#include "outer_product.cuh"

namespace tessera::cuda::gemm {

// Bytes of B that a k_tile brings.
template <GemmConfig kGemm>
__device__ __forceinline__ uint32_t b_bytes_of(GemmParams const& p, WorkTile const& tile) {
  if (misses_groups<kGemm>(p, tile)) {
    return static_cast<uint32_t>(p.b_groups) * kGemm.b_terms() *
           (kGroupRows * kGemm.tile.k * sizeof(bf16));
  }
  return kGemm.b_tile_bytes();
}

// One box of B, sent to every CTA of the cluster.
template <GemmConfig kGemm, class... Coordinates>
__device__ __forceinline__ void load_b_box(bf16* smem_b, CUtensorMap const* map,
                                           arch::Mbarrier* full, Coordinates... coordinates) {
  if constexpr (kGemm.cluster_m() == 1) {
    arch::tma_load(smem_b, map, full, coordinates...);
  } else {
    constexpr uint16_t kEveryCta = (1u << kGemm.cluster_m()) - 1;
    arch::tma_load_multicast(smem_b, map, full, kEveryCta, coordinates...);
  }
}

// The same share by a box for every half and row group: any layout that make_weight_map() takes.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_b_in_boxes(bf16* smem_b, GemmParams const& p,
                                                arch::Mbarrier* full, int k, int k_half, int group,
                                                WorkTile const& tile) {
  TESSERA_UNROLL
  for (int box = 0; box < kGemm.b_groups_per_cta() * kGemm.b_halves(); ++box) {
    if (misses_groups<kGemm>(p, tile) && box == p.b_groups) break;
    int const row = (group + box / kGemm.b_halves()) * kGroupRows;
    int c0 = k;
    int c1 = row;
    int c2 = 0;
    if constexpr (kGemm.b.major == Major::kRows) {
      c0 = row;
      c1 = k;
    } else if (p.b_block <= kGroupRows) {
      c1 = 0;
      c2 = row / p.b_block;
    } else if (row >= p.b_block) {
      c1 = row % p.b_block;
      c2 = row / p.b_block;
    }
    load_b_box<kGemm>(smem_b + box * kGroupRows * kGemm.tile.k,
                      &p.b_half[kGemm.k_halves() == 2 ? k_half : box % kGemm.b_halves()], full, c0,
                      c1, c2, tile.segment);
  }
}

// varlen-K: rows `k` from the segment's end back, as its ragged maps count them.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_b_along_k(bf16* smem_b, GemmParams const& p,
                                               arch::Mbarrier* full, int k, int group, int end) {
  int const ragged_k = p.ragged_extent + k - end;
  if (kGemm.any_b_layout() && p.b_in_boxes) {
    TESSERA_UNROLL
    for (int box = 0; box < kGemm.b_groups_per_cta(); ++box) {
      if (kGemm.short_b() && box == p.b_groups) break;
      int const half = (group + box) / p.b_half_groups;
      load_b_box<kGemm>(smem_b + box * kGroupRows * kGemm.tile.k, &p.b_half[0], full,
                        (group + box - half * p.b_half_groups) * kGroupRows, half, ragged_k, end,
                        p.ragged_extent);
    }
  } else {
    load_b_box<kGemm>(smem_b, &p.b[0], full, 0, ragged_k, group, end, p.ragged_extent);
  }
}

// This CTA's share of a B tile, into `buffer`, reported to `full`. Called by one thread. The usual layouts take one
// load: four instead of one cost the gathering kernel 5%, and the short k loops of down_projection_fwd 10%.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_b_to(SharedStorage<kGemm>& smem, GemmParams const& p,
                                          int buffer, arch::Mbarrier* full, int k_tile,
                                          WorkTile const& tile) {
  int const share = kGemm.cluster_m() == 1
                        ? 0
                        : static_cast<int>(arch::cluster_cta_rank()) * kGemm.b_groups_per_cta();
  int const group = tile.n_tile * kGemm.b_groups() + share;
  int const k_half = kGemm.k_halves() == 2 && k_tile >= p.k_half_tiles ? 1 : 0;
  int const k = (k_tile - k_half * p.k_half_tiles) * kGemm.tile.k;
  bf16* const smem_b = &smem.b[buffer][share * kGemm.b_halves() * kGroupRows * kGemm.tile.k];
  if constexpr (kGemm.b_terms() > 1) {
    TESSERA_UNROLL
    for (int term = 0; term < kGemm.b_terms(); ++term) {
      bf16* const smem_term = smem_b + term * kGemm.tile.n * kGemm.tile.k;
      int const k_term = k * kGemm.b_terms() + term * kGemm.tile.k;
      if (kGemm.any_b_layout() && p.b_in_boxes) {
        load_b_in_boxes<kGemm>(smem_term, p, full, k_term, 0, group, tile);
      } else {
        load_b_box<kGemm>(smem_term, &p.b[0], full, k_term, 0, 0, group, tile.segment);
      }
    }
  } else if constexpr (kGemm.varlen_k()) {
    load_b_along_k<kGemm>(smem_b, p, full, tile.begin + k, group, tile.end);
  } else if ((kGemm.any_b_layout() && p.b_in_boxes) ||
             (kGemm.partial_last() && misses_groups<kGemm>(p, tile))) {
    load_b_in_boxes<kGemm>(smem_b, p, full, k, k_half, group, tile);
  } else if constexpr (kGemm.b.major == Major::kK) {
    load_b_box<kGemm>(smem_b, &p.b[k_half], full, k, 0, 0, group, tile.segment);
  } else {
    load_b_box<kGemm>(smem_b, &p.b[k_half], full, 0, k, 0, group, tile.segment);
  }
}

template <GemmConfig kGemm>
__device__ __forceinline__ void load_b(SharedStorage<kGemm>& smem, GemmParams const& p, int stage,
                                       int k_tile, WorkTile const& tile) {
  load_b_to<kGemm>(smem, p, stage, &smem.full[stage], k_tile, tile);
}

template <GemmConfig kGemm>
__device__ __forceinline__ void load_a(SharedStorage<kGemm>& smem, GemmParams const& p, int stage,
                                       int k_tile, WorkTile const& tile) {
  if constexpr (kGemm.varlen_k()) {
    // Segments are whole k_tiles, but for the last one, where A ends.
    TESSERA_UNROLL
    for (int row = 0; row < kGemm.tile.m; row += kSubtileM) {
      arch::tma_load(&smem.a[stage][row * kGemm.tile.k], &p.a, &smem.full[stage], tile.row + row,
                     tile.begin + k_tile * kGemm.tile.k);
    }
  } else if constexpr (kGemm.k_halves() == 2) {
    int const half = k_tile >= p.k_half_tiles ? 1 : 0;
    arch::tma_load(smem.a[stage], &p.a, &smem.full[stage],
                   (k_tile - half * p.k_half_tiles) * kGemm.tile.k, half, tile.row);
  } else {
    arch::tma_load(smem.a[stage], &p.a, &smem.full[stage], k_tile * kGemm.tile.k, tile.row);
  }
}

// k_tile of the B of a new run, once the run before needs it no more.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_resident_b(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                int k_tile, WorkTile const& tile) {
  arch::mbarrier_wait(&smem.resident_empty[k_tile], tile.run_phase ^ 1);
  if (arch::elect_one()) {
    arch::Mbarrier* const full = &smem.resident_full[k_tile];
    arch::mbarrier_arrive_expect_tx(full, kGemm.b_tile_bytes());
    load_b_to<kGemm>(smem, p, k_tile, full, k_tile, tile);
  }
  __syncwarp();
}

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

// Four warps gather A; in turns, one also issues B, before its share of A.
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

// varlen-K: every k_tile has tokens of its own.
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
  WorkTile tile;
  // In turns, counted from the end: not the first warp's where it announces a tile, four k_tiles before.
  auto const fills_b = [warp = arch::warp_idx() % 4](int k_tiles_left) {
    return warp == static_cast<int>(static_cast<uint32_t>(k_tiles_left + 2) % 4);
  };
  auto const fill_b = [&](int k_tile, int k_tiles) {
    if (fills_b(k_tiles - k_tile) && arch::elect_one()) {
      arch::Mbarrier* const full = &smem.full[b_state.stage];
      arch::mbarrier_arrive_expect_tx(full, b_bytes_of<kGemm>(p, tile));
      load_b_to<kGemm>(smem, p, b_state.b_stage(), full, k_tile, tile);
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
}

template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void produce_with_gather(
    SharedStorage<kGemm>& smem, GemmParams const& p,
    typename Epilogue::Params const& epilogue_params) {
  if constexpr (kGemm.varlen_k()) {
    produce_along_k<kGemm, Epilogue, kFirstWarp>(smem, p, epilogue_params);
  } else {
    produce_by_gather<kGemm, Epilogue, kFirstWarp>(smem, p, epilogue_params);
  }
}

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void produce(SharedStorage<kGemm>& smem, GemmParams const& p,
                                        typename Epilogue::Params const& epilogue_params) {
  arch::release_registers<kGemm.producer_registers()>();
  if constexpr (kGemm.gathers()) {
    if (arch::warp_idx() == 0) {
      produce_with_gather<kGemm, Epilogue, true>(smem, p, epilogue_params);
    } else {
      produce_with_gather<kGemm, Epilogue, false>(smem, p, epilogue_params);
    }
  } else {
    int const warp = arch::warp_idx();
    if (warp == 0) {
      produce_by_tma<kGemm, Epilogue>(smem, p, epilogue_params);
    } else if (kGemm.schedules_apart() && warp == 1) {
      TileScheduler<kGemm>(smem, p).run(p.k_tiles);
    }
  }
}

}  // namespace tessera::cuda::gemm
