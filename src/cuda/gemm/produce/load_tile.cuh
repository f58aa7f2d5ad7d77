// SPDX-License-Identifier: Apache-2.0
// The operands of a k_tile by TMA, into a stage of the ring or, for a B that stays, beside it.
#pragma once

#include "../../arch/cluster.cuh"
#include "../ring.cuh"
#include "b_boxes.cuh"

namespace tessera::cuda::gemm {

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

// Loads a k_tile of B of a new run, once the previous run has no more use for its place.
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

}  // namespace tessera::cuda::gemm
