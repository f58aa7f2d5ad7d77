// SPDX-License-Identifier: Apache-2.0
// The part of a work tile that exists: row groups of B, columns, k_tiles, and k16 steps of the last one.
#pragma once

#include "params.hpp"
#include "storage.cuh"
#include "work_tile.hpp"

namespace tessera::cuda::gemm {

// Says whether some of the row groups of this tile of B do not exist: p.b_groups of them do, in one half.
template <GemmConfig kGemm>
__device__ __forceinline__ bool misses_groups(GemmParams const& p, WorkTile const& tile) {
  return kGemm.short_b() || (kGemm.partial_last() && tile.n_tile == p.n_tiles - 1);
}

// Says whether this tile has half of its columns at most.
template <GemmConfig kGemm>
__device__ __forceinline__ bool is_half(GemmParams const& p, WorkTile const& tile) {
  return kGemm.halves_last() && misses_groups<kGemm>(p, tile) && p.b_groups <= kGemm.b_groups() / 2;
}

// Counts the k_tiles of a tile. varlen-K: a segment without rows takes a k_tile of zeros.
template <GemmConfig kGemm>
__device__ __forceinline__ int k_tiles_of(GemmParams const& p, WorkTile const& tile) {
  if constexpr (kGemm.varlen_k()) {
    return max(1, (tile.end - tile.begin + kGemm.tile.k - 1) / kGemm.tile.k);
  } else if constexpr (kGemm.keeps_b()) {
    return tile.rows > 0 ? p.k_tiles : 0;
  } else {
    return p.k_tiles;
  }
}

// varlen-K: counts the last k_tile's k16 steps that have rows.
template <GemmConfig kGemm>
__device__ __forceinline__ int last_steps_of(WorkTile const& tile) {
  return (tile.end - tile.begin - 1) % kGemm.tile.k / 16 + 1;
}

}  // namespace tessera::cuda::gemm
