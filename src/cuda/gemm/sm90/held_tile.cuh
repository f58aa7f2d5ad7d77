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
  }

  // The tile held before must have been worked on.
  __device__ __forceinline__ void keep(Accumulators<kGemm> const& acc) const {
    __syncwarp();
    TESSERA_UNROLL
    for (int slab = 0; slab < 4; ++slab) {
      rows_.fill(smem_slabs_ + slab * kSubtileM * kSlabColumns,
                 [&](int i) { return acc.packed(slab, i); });
    }
    __syncwarp();
  }

  // A lane's place in a piece, worked out anew for each: accumulators and partial sums leave few registers.
  struct Place {
    uint32_t smem;  // in the first slab
    int row;        // among the warp's 16
    int column;     // the first one in a slab

    __device__ __forceinline__ uint4 load(int slab) const {
      return arch::load_shared_16(smem + slab * kSlabBytes);
    }
  };
  __device__ __forceinline__ Place place(int piece) const {
    int const thread = static_cast<int>(arch::forgotten(threadIdx.x)) % arch::kWarpgroupThreads;
    int const lane = thread % arch::kWarpThreads, chunk = lane % 8;
    int const row = piece * kPieceRows + lane / 8;
    int const slab_row = thread / arch::kWarpThreads * kWarpRows + row;
    return {.smem = arch::shared_address(smem_slabs_) + slab_row * 128 + ((chunk ^ (row & 7)) << 4),
            .row = row,
            .column = chunk * 8};
  }

 private:
  static constexpr uint32_t kSlabBytes = kSubtileM * kSlabColumns * sizeof(bf16);

  bf16* smem_slabs_;
  SlabRows rows_;
};

}  // namespace tessera::cuda::gemm
