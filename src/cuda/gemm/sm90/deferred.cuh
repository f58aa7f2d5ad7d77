// SPDX-License-Identifier: Apache-2.0
// An epilogue under the next tile's k loop. A tile's accumulators are rounded to bf16 at once, in half of a k_tile's
// time, and kept: of each warp's 16 rows x 256 columns the first column group in shared memory, the second in
// registers, until the first has been worked on and left its place. What is to be done with them is cut into pieces,
// and each is done behind the wgmmas of some k_tile:
//   warpgroup 0  | round | mma k0, piece 0 | mma k1          | mma k2, piece 1 | mma k3          | ..
//   warpgroup 1  | round | mma k0          | mma k1, piece 0 | mma k2          | mma k3, piece 1 | ..
// In turns, as the tensor cores have the other warpgroup's wgmmas meanwhile. Pieces store from registers, 128 bytes of
// a row by eight lanes: a store by TMA needs a fence between proxies, which waits for wgmmas in flight. Warps work
// alone, but where columns are stored: a warp has only 32 bytes of one.
// Measured: lesson 6 of docs/lessons.md
#pragma once

#include "../../arch/load_shared.cuh"
#include "../../arch/named_barrier.cuh"
#include "../../arch/shared_address.cuh"
#include "../scheduler.cuh"
#include "../slabs.cuh"
#include "slab_fill.cuh"

namespace tessera::cuda::gemm {

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

// A column group of a warp's 16 rows lies in the warpgroup's slabs in rows of 128 bytes, swizzled. A lane's share
// of a piece is 8 columns of each slab, those of a row are eight lanes'.
template <GemmConfig kGemm>
class HeldRows {
 public:
  struct Piece {
    uint32_t smem;
    int row;     // among the warp's 16
    int group;   // of columns
    int column;  // among the slab's 64

    __device__ __forceinline__ uint4 load(int slab) const {
      return arch::load_shared_16(smem + slab * kSlabBytes);
    }
  };

  __device__ __forceinline__ HeldRows(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]) {
    int const row = lane_row(), chunk = arch::lane_idx() % 8;
    smem_row_ =
        arch::shared_address(smem_slabs_) + (arch::warp_in_warpgroup() * kWarpRows + row) * 128;
    swizzled_ = (chunk ^ row) << 4;
  }

  // packed(i): pair i of a column group, those of its second slab behind those of the first.
  template <typename Packed>
  __device__ __forceinline__ void fill(Packed packed) const {
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      rows_.fill(smem_slabs_ + slab * kSubtileM * kSlabColumns,
                 [&](int i) { return packed(slab * Accumulators<kGemm>::kPairs + i); });
    }
  }

  __device__ __forceinline__ void sync() const { __syncwarp(); }

  // The row of a lane's share of a group's first piece; those of the others are kPieceRows further on.
  static constexpr int kPieceRows = 4;
  __device__ __forceinline__ static int lane_row() { return arch::lane_idx() / 8; }
  __device__ __forceinline__ static int lane_column() { return arch::lane_idx() % 8 * 8; }

  __device__ __forceinline__ Piece piece(int group, int quarter) const {
    // Rows four further on have the other half of the swizzle.
    return {.smem = smem_row_ + quarter * (kPieceRows * 128) + (swizzled_ ^ (quarter & 1) << 6),
            .row = quarter * kPieceRows + lane_row(),
            .group = group,
            .column = lane_column()};
  }

 private:
  static constexpr uint32_t kSlabBytes = kSubtileM * kSlabColumns * sizeof(bf16);

  bf16* smem_slabs_;
  SlabRows rows_;
  uint32_t smem_row_;  // this lane's first
  uint32_t swizzled_;  // its chunk there
};

// The same, transposed: the warpgroup's 64 rows are 128 bytes of each of the group's 128 columns, swizzled. Its warps
// fill and read them together. A piece is 32 columns, a warp's share 8 of them, a lane's 8 rows of two columns that are
// 4 apart; the 64 rows of a column are eight lanes'.
template <GemmConfig kGemm>
class HeldColumns {
 public:
  struct Piece {
    uint32_t smem;

    // Columns four further on have the other half of the swizzle.
    __device__ __forceinline__ uint4 load(int part) const {
      return arch::load_shared_16(smem ^ part * (kSecondColumn * kColumnBytes | 4 << 4));
    }
  };

  __device__ __forceinline__ HeldColumns(SharedStorage<kGemm>& smem, int consumer)
      : barrier_(kBarrierSlabs + consumer) {
    int const lane = arch::lane_idx(), warp = arch::warp_in_warpgroup();
    uint32_t const slabs = arch::shared_address(&smem.slabs[consumer][0][0]);
    // Matrix lane/8 of an x4: bit 0 selects the lower 8 rows, bit 1 the right 8 columns.
    matrix_row_ = slabs + (lane / 16 * 8 + lane % 8) * kColumnBytes +
                  ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
    smem_column_ = slabs + lane_column() * kColumnBytes + ((lane % 8 ^ lane / 8) << 4);
  }

  template <typename Packed>
  __device__ __forceinline__ void fill(Packed packed) const {
    TESSERA_UNROLL
    for (int j = 0; j < kGroupColumns / 8; j += 2) {
      arch::stmatrix_x4_transposed(matrix_row_ + j * 8 * kColumnBytes, packed(2 * j),
                                   packed(2 * j + 1), packed(2 * j + 2), packed(2 * j + 3));
    }
  }
  __device__ __forceinline__ void sync() const {
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
  }

  // The first column of a lane's share of a group's first piece; those of the others are kPieceColumns further on.
  static constexpr int kPieceColumns = 32, kSecondColumn = 4;
  __device__ __forceinline__ static int lane_row() { return arch::lane_idx() % 8 * 8; }
  __device__ __forceinline__ static int lane_column() {
    return arch::warp_in_warpgroup() * (2 * kSecondColumn) + arch::lane_idx() / 8;
  }

  __device__ __forceinline__ Piece piece(int /*group*/, int quarter) const {
    return {.smem = smem_column_ + quarter * (kPieceColumns * kColumnBytes)};
  }

 private:
  static constexpr uint32_t kColumnBytes = kSubtileM * sizeof(bf16);

  int barrier_;
  uint32_t smem_column_;  // this lane's first
  uint32_t matrix_row_;
};

// 64 rows x 256 columns of a warpgroup, as one of its warps sees its 16 rows.
template <GemmConfig kGemm, class LayoutOf>
class DeferredTile {
 public:
  using Layout = LayoutOf;
  using Piece = typename Layout::Piece;

  __device__ __forceinline__ DeferredTile(SharedStorage<kGemm>& smem, int consumer)
      : layout_(smem, consumer) {
    static_assert(kGemm.epilogue.slabs == 2 && kGemm.column_groups() == 2);
  }

  // A column group, the second one first. What was kept before must have been worked on.
  template <int kGroup>
  __device__ __forceinline__ void keep(Accumulators<kGemm> const& acc) {
    auto const packed = [&](int i) { return acc.packed(2 * kGroup + i / kPairs, i % kPairs); };
    if constexpr (kGroup == 0) {
      fill(packed);
    } else {
      TESSERA_UNROLL
      for (int i = 0; i < 2 * kPairs; ++i) later_[i] = packed(i);
    }
  }

  // Pieces in their order.
  __device__ __forceinline__ Piece take(int piece) {
    if (piece == kDeferredPieces / 2) fill([&](int i) { return later_[i]; });
    return layout_.piece(piece >> 2, piece & 3);
  }

 private:
  static constexpr int kPairs = Accumulators<kGemm>::kPairs;

  template <typename Packed>
  __device__ __forceinline__ void fill(Packed packed) const {
    layout_.sync();
    layout_.fill(packed);
    layout_.sync();
  }

  Layout layout_;
  uint32_t later_[2 * kPairs];
};

template <GemmConfig kGemm>
using DeferredRows = DeferredTile<kGemm, HeldRows<kGemm>>;

}  // namespace tessera::cuda::gemm
