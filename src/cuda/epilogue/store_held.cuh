// SPDX-License-Identifier: Apache-2.0
// store epilogue of scaled operands: D = accumulators, rounded once to bf16. A warpgroup that does nothing
// else runs it (gemm/sm90/roles_scaled.cuh).
#pragma once

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"

namespace tessera::cuda::gemm {

struct StoreHeldParams {
  bf16* gmem_d;  // (rows, columns)
  int columns;   // whole column groups
};

template <class Core>
class StoreHeld {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  static constexpr EpilogueMode kMode = EpilogueMode::kApart;
  using HeldTile = typename Core::HeldTile;
  using Params = StoreHeldParams;

  __device__ __forceinline__ StoreHeld(typename Core::Storage& smem, Params const& p)
      : p_(p), held_(smem) {
    static_assert(kGemm.b_halves() == 1);
  }

  // The warp's 16 rows, four at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t) {
    held_.of(consumer);
    bool const is_whole = (tile.n_tile + 1) * kGemm.tile.n <= p_.columns;
    int const first = tile.row + consumer * kSubtileM + arch::warp_in_warpgroup() * kWarpRows;
#pragma unroll 1
    for (int piece = 0; piece < HeldTile::kPieces; ++piece) {
      auto const at = held_.place(piece);
      int const row = first + at.row;
      bf16* const gmem =
          p_.gmem_d + int64_t{row} * p_.columns + tile.n_tile * kGemm.tile.n + at.column;
      uint4 values[4];
      TESSERA_UNROLL
      for (int slab = 0; slab < 4; ++slab) values[slab] = at.load(slab);
      if (row < tile.end) {
        TESSERA_UNROLL
        for (int slab = 0; slab < 4; ++slab) {
          if (slab < 2 || is_whole)
            arch::store_streaming_16(gmem + slab * kSlabColumns, values[slab]);
        }
      }
      __syncwarp();
    }
  }

 private:
  Params const& p_;
  HeldTile held_;
};

}  // namespace tessera::cuda::gemm
