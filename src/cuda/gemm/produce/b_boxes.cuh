// SPDX-License-Identifier: Apache-2.0
// Loads of B by TMA, box by box, multicast to the cluster.
#pragma once

#include "../../arch/tma.cuh"
#include "../params.hpp"
#include "../tile_extent.cuh"

namespace tessera::cuda::gemm {

// Returns the bytes of B in a k_tile.
template <GemmConfig kGemm>
__device__ __forceinline__ uint32_t b_bytes_of(GemmParams const& p, WorkTile const& tile) {
  if (misses_groups<kGemm>(p, tile)) {
    return static_cast<uint32_t>(p.b_groups) * kGemm.b_terms() *
           static_cast<uint32_t>(kGemm.b.bytes(kGroupRows, kGemm.tile.k));
  }
  return kGemm.b_tile_bytes();
}

// load() sends a box of B to every CTA of the cluster. Pairs of sm_100a have a load() of their own
// (sm100/pair_loads.cuh).
template <GemmConfig kGemm>
struct BoxLoad {
  template <class... Coordinates>
  __device__ __forceinline__ static void load(bf16* smem_b, CUtensorMap const* map,
                                              arch::Mbarrier* full, Coordinates... coordinates) {
    if constexpr (kGemm.cluster_m() == 1) {
      arch::tma_load(smem_b, map, full, coordinates...);
    } else {
      constexpr uint16_t kEveryCta = (1u << kGemm.cluster_m()) - 1;
      arch::tma_load_multicast(smem_b, map, full, kEveryCta, coordinates...);
    }
  }
};
template <GemmConfig kGemm, class... Coordinates>
__device__ __forceinline__ void load_b_box(bf16* smem_b, CUtensorMap const* map,
                                           arch::Mbarrier* full, Coordinates... coordinates) {
  BoxLoad<kGemm>::load(smem_b, map, full, coordinates...);
}

// Loads the same share by a box for every half and row group, which serves any layout that make_weight_map() takes.
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

// varlen-K: `k` counts rows back from the segment's end, as ragged maps do.
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

}  // namespace tessera::cuda::gemm
