// SPDX-License-Identifier: Apache-2.0
// store epilogue of scaled operands: D = accumulators, rounded once to bf16, stored under the next tile's k loop
// (gemm/sm90/held_tile.cuh).
#pragma once

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"

namespace tessera::cuda::gemm {

struct StoreHeldParams {
  bf16* gmem_d;  // (rows, columns)
  int columns;   // whole tiles
};

template <class Core>
class StoreHeld {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using HeldTile = typename Core::HeldTile;
  using Params = StoreHeldParams;
  static constexpr bool kPiecesUnderProducts = true;
  static constexpr int kPieces = 2 * HeldTile::kPieces;

  __device__ __forceinline__ StoreHeld(typename Core::Storage& smem, Params const& p, int consumer)
      : p_(p), held_(smem, consumer) {
    static_assert(kGemm.b_halves() == 1);
  }

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(typename Core::Accumulators const& acc, WorkTile const& tile,
                                       int row) {
    row_ = row + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    column_ = tile.n_tile * kGemm.tile.n;
    held_.keep(acc);
  }

  // Pieces in turns of the column groups, of the same rows.
  __device__ __forceinline__ void work(int piece) {
    auto const at = held_.place(piece / 2);
    int const row = row_ + at.row, group = piece % 2;
    bf16* const gmem =
        p_.gmem_d + int64_t{row} * p_.columns + column_ + group * kGroupColumns + at.column;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint4 const values = at.load(2 * group + slab);
      if (row < end_) arch::store_streaming_16(gmem + slab * kSlabColumns, values);
    }
    __syncwarp();
  }

 private:
  Params const& p_;
  HeldTile held_;
  int row_ = 0;  // the warp's first
  int end_ = 0;
  int column_ = 0;
};

}  // namespace tessera::cuda::gemm
