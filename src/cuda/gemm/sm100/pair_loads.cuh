// SPDX-License-Identifier: Apache-2.0
// The warps that load, in a pair of CTAs: each CTA loads its rows of A and its half of B, and reports both to CTA 0,
// which alone expects their bytes. What CTA 1 loads may land before CTA 0 expects it: that belongs to the same phase.
// Where A is gathered, a relay of each CTA reports its rows (arch/sm100/relay.cuh).
#pragma once

#include "../../arch/cluster.cuh"
#include "../../arch/sm100/pair_tma.cuh"
#include "../../arch/sm100/relay.cuh"
#include "../produce/b_boxes.cuh"
#include "../produce/gathered_stage.cuh"
#include "../ring.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// A box of B is this CTA's alone.
template <GemmConfig kGemm>
  requires(in_tensor_memory(kGemm) && kGemm.cluster_m() == 2)
struct BoxLoad<kGemm> {
  template <class... Coordinates>
  __device__ __forceinline__ static void load(bf16* smem_b, CUtensorMap const* map,
                                              arch::Mbarrier* full, Coordinates... coordinates) {
    arch::tma_load_for_pair(smem_b, map, full, coordinates...);
  }
};

// The half of k that a k_tile is of.
template <GemmConfig kGemm>
__device__ __forceinline__ int k_half_of(GemmParams const& p, int k_tile) {
  return kGemm.k_halves() == 2 && k_tile >= p.k_half_tiles ? 1 : 0;
}

// One thread calls it: this CTA's half of B.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_pair_b(SharedStorage<kGemm>& smem, GemmParams const& p,
                                            int stage, int k_tile, WorkTile const& tile) {
  arch::Mbarrier* const full = &smem.full[stage];
  auto const rank = static_cast<int>(arch::cluster_cta_rank());
  int const k_half = k_half_of<kGemm>(p, k_tile);
  int const k = (k_tile - k_half * p.k_half_tiles) * kGemm.tile.k;
  int const group = tile.n_tile * kGemm.b_groups() + rank * kGemm.b_groups_per_cta();
  if constexpr (kGemm.varlen_k()) {
    load_b_along_k<kGemm>(smem.b[stage], p, full, tile.begin + k, group, tile.end);
  } else if (p.b_in_boxes) {
    load_b_in_boxes<kGemm>(smem.b[stage], p, full, k, k_half, group, tile);
  } else if constexpr (kGemm.b.major == Major::kK) {
    load_b_box<kGemm>(smem.b[stage], &p.b[k_half], full, k, 0, 0, group, tile.segment);
  } else {
    load_b_box<kGemm>(smem.b[stage], &p.b[k_half], full, 0, k, 0, group, tile.segment);
  }
}

// Rows of A are reported to this CTA's relay.
template <GemmConfig kGemm>
  requires(in_tensor_memory(kGemm) && kGemm.cluster_m() == 2)
struct GatheredStage<kGemm> {
  __device__ __forceinline__ static arch::Mbarrier* rows(SharedStorage<kGemm>& smem, int stage) {
    return &smem.gathered[stage];
  }
  __device__ __forceinline__ static void fill_b(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                int stage, int, int k_tile, WorkTile const& tile) {
    if (arch::cluster_cta_rank() == 0) {
      arch::mbarrier_arrive_expect_tx(&smem.full[stage], kGemm.b_tile_bytes());
    }
    load_pair_b<kGemm>(smem, p, stage, k_tile, tile);
  }
};

// The relay of a CTA: its rows of a k_tile have landed.
template <GemmConfig kGemm>
__device__ __forceinline__ void relay_rows(SharedStorage<kGemm>& smem, GemmParams const& p) {
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  WorkTile tile;
  while (queue.read(tile)) {
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      arch::mbarrier_wait(&smem.gathered[state.stage], state.phase);
      if (arch::elect_one()) arch::relay_arrive(&smem.full[state.stage], 0);
      __syncwarp();
      state.advance();
    }
  }
}

// One thread calls it.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_pair_stage(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                int stage, int k_tile, WorkTile const& tile) {
  arch::Mbarrier* const full = &smem.full[stage];
  if (arch::cluster_cta_rank() == 0) {
    arch::mbarrier_arrive_expect_tx(full, 2 * kGemm.a_tile_bytes() + kGemm.b_tile_bytes());
  }
  int const k_half = k_half_of<kGemm>(p, k_tile);
  int const k = (k_tile - k_half * p.k_half_tiles) * kGemm.tile.k;
  if constexpr (kGemm.k_halves() == 2) {
    arch::tma_load_for_pair(smem.a[stage], &p.a, full, k, k_half, tile.row);
  } else {
    arch::tma_load_for_pair(smem.a[stage], &p.a, full, k, tile.row);
  }
  load_pair_b<kGemm>(smem, p, stage, k_tile, tile);
}

template <GemmConfig kGemm>
__device__ __forceinline__ void load_for_pair(SharedStorage<kGemm>& smem, GemmParams const& p) {
  bool const schedules = arch::cluster_cta_rank() == 0;
  TileScheduler<kGemm> scheduler(smem, p);
  WorkQueue<kGemm, true> queue(smem);
  PipelineState<kGemm> state;
  WorkTile tile;
  if (schedules) scheduler.announce_first(p.k_tiles);
  while (queue.read(tile)) {
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      if (schedules) scheduler.step(k_tile, p.k_tiles);
      wait_empty<kGemm>(smem, state);
      if (arch::elect_one()) load_pair_stage<kGemm>(smem, p, state.stage, k_tile, tile);
      __syncwarp();
      state.advance();
    }
  }
}

}  // namespace tessera::cuda::gemm
