// SPDX-License-Identifier: Apache-2.0
// 64 rows x 256 columns of a warpgroup, held in its four slabs in bf16, while registers belong to the next tile: what
// deferred.cuh does with two slabs and registers. A warp fills and reads its own 16 rows alone. A piece is four rows of
// all columns; a lane's share 8 columns of each slab, those of a row are eight lanes'. Gated: slabs are gate, up of the
// first column group, then of the second.
#pragma once

#include "../../arch/load_shared.cuh"
#include "accumulators.cuh"
#include "slab_fill.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
class HeldTile {
 public:
  static constexpr int kPieces = 4, kPieceRows = kWarpRows / kPieces;

  __device__ __forceinline__ HeldTile(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]) {
    static_assert(kGemm.epilogue.slabs == 4);
    smem_row_ = arch::shared_address(smem_slabs_) +
                (arch::warp_in_warpgroup() * kWarpRows + lane_row()) * 128;
    swizzled_ = (arch::lane_idx() % 8 ^ lane_row()) << 4;
  }

  // What was held before must have been worked on.
  __device__ __forceinline__ void keep(Accumulators<kGemm> const& acc) const {
    __syncwarp();
    TESSERA_UNROLL
    for (int slab = 0; slab < 4; ++slab) {
      rows_.fill(smem_slabs_ + slab * kSubtileM * kSlabColumns,
                 [&](int i) { return acc.packed(slab, i); });
    }
    __syncwarp();
  }

  // Of the warp's 16 rows this lane's in a piece, and its first column in a slab.
  __device__ __forceinline__ static int row(int piece) { return piece * kPieceRows + lane_row(); }
  __device__ __forceinline__ static int column() { return arch::lane_idx() % 8 * 8; }

  __device__ __forceinline__ uint4 load(int piece, int slab) const {
    // Rows four further on have the other half of the swizzle.
    return arch::load_shared_16(smem_row_ + slab * kSlabBytes + piece * (kPieceRows * 128) +
                                (swizzled_ ^ (piece & 1) << 6));
  }

 private:
  static constexpr uint32_t kSlabBytes = kSubtileM * kSlabColumns * sizeof(bf16);
  __device__ __forceinline__ static int lane_row() { return arch::lane_idx() / 8; }

  bf16* smem_slabs_;
  SlabRows rows_;
  uint32_t smem_row_;  // this lane's first
  uint32_t swizzled_;  // its chunk there
};

}  // namespace tessera::cuda::gemm
