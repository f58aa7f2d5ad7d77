// SPDX-License-Identifier: Apache-2.0
// An epilogue under the next tile's k loop. A tile's accumulators are rounded to bf16 at once, in half of a k_tile's
// time, and kept: of each warp's 16 rows x 256 columns the first column group in shared memory, the second in
// registers, until the first has been worked on and left its place. What is to be done with them is cut into pieces,
// and each is done behind the wgmmas of some k_tile, by the warp alone:
//   warpgroup 0  | round | mma k0, piece 0 | mma k1          | mma k2, piece 1 | mma k3          | ..
//   warpgroup 1  | round | mma k0          | mma k1, piece 0 | mma k2          | mma k3, piece 1 | ..
// In turns, as the tensor cores have the other warpgroup's wgmmas meanwhile. Pieces store from registers, 128 bytes of
// a row by eight lanes: a store by TMA needs a fence between proxies, which waits for wgmmas in flight.
// Measured: docs/notebook/2026-11-22-deferred-epilogues.md
#pragma once

#include "../arch/load_shared.cuh"
#include "../arch/shared_address.cuh"
#include "slab_store.cuh"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

// Of 64 rows x 256 columns: column groups, four rows of each warp at a time.
constexpr int kDeferredPieces = 2 * 4;

// Behind which of a tile's k_tiles a warpgroup does its pieces: first, first + every, ..; and how many at once.
struct Pace {
  int first, every, at_once;
};

// All pieces find their place.
__device__ __forceinline__ Pace pace_of(int k_tiles, int consumer) {
  int const every = k_tiles >= 16 || k_tiles < 12 ? 2 : 3;
  int const first = min(consumer, k_tiles - 1);
  int const left = k_tiles - first - 1;
  int const times = 1 + (every == 2 ? left / 2 : left / 3);
  // Only few k_tiles take a division, whose time nothing would hide.
  int const at_once = times >= kDeferredPieces       ? 1
                      : times >= kDeferredPieces / 2 ? 2
                                                     : (kDeferredPieces + times - 1) / times;
  return {first, every, at_once};
}

// 64 rows x 256 columns of a warpgroup, as one of its warps sees its 16 rows.
template <GemmConfig kGemm>
class DeferredRows {
 public:
  static constexpr uint32_t kSlabBytes = kSubtileM * kSlabColumns * sizeof(bf16);

  // This lane's share of a piece: 8 columns of each slab of a group.
  struct Piece {
    uint32_t smem;
    int row;     // among the warp's 16
    int group;   // of columns
    int column;  // among the slab's 64

    __device__ __forceinline__ uint4 load(int slab) const {
      return arch::load_shared_16(smem + slab * kSlabBytes);
    }
  };

  __device__ __forceinline__ DeferredRows(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]) {
    static_assert(kGemm.store_slabs == 2 && kGemm.column_groups() == 2);
    int const row = arch::lane_idx() / 8, chunk = arch::lane_idx() % 8;
    smem_row_ =
        arch::shared_address(smem_slabs_) + (arch::warp_in_warpgroup() * kWarpRows + row) * 128;
    swizzled_ = (chunk ^ row) << 4;
  }

  // A column group, the second one first. What was kept before must have been worked on.
  template <int kGroup>
  __device__ __forceinline__ void keep(float const (&acc)[kGroupColumns / 2]) {
    auto const packed = [&](int i) { return arch::pack_bf16(acc[2 * i], acc[2 * i + 1]); };
    if constexpr (kGroup == 0) {
      fill(packed);
    } else {
      TESSERA_UNROLL
      for (int i = 0; i < kGroupColumns / 4; ++i) later_[i] = packed(i);
    }
  }

  // Pieces in their order.
  __device__ __forceinline__ Piece take(int piece) {
    if (piece == kDeferredPieces / 2) fill([&](int i) { return later_[i]; });
    int const quarter = piece & 3;
    // Rows four further on have the other half of the swizzle.
    return {.smem = smem_row_ + quarter * (4 * 128) + (swizzled_ ^ (quarter & 1) << 6),
            .row = quarter * 4 + arch::lane_idx() / 8,
            .group = piece >> 2,
            .column = arch::lane_idx() % 8 * 8};
  }

 private:
  // packed(i): values 2i and 2i + 1 of a group of this thread's accumulators.
  template <typename Packed>
  __device__ __forceinline__ void fill(Packed packed) const {
    __syncwarp();
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      rows_.fill(smem_slabs_ + slab * kSubtileM * kSlabColumns, [&](int j, int lower) {
        return packed(slab * (kGroupColumns / 8) + 2 * j + lower);
      });
    }
    __syncwarp();
  }

  bf16* smem_slabs_;
  SlabRows rows_;
  uint32_t smem_row_;  // this lane's first
  uint32_t swizzled_;  // its chunk there
  uint32_t later_[kGroupColumns / 4];
};

}  // namespace tessera::cuda::block
