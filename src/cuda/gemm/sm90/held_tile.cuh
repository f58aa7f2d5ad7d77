// SPDX-License-Identifier: Apache-2.0
// 64 rows x 256 columns of a consumer warpgroup lie in its four slabs, in bf16, for the warpgroup that stores: what
// deferred.cuh does with two slabs and registers. A warp fills its own 16 rows, and one warp reads them. A piece is
// four rows of all columns. Gated: slabs are gate, up of the first column group, then of the second.
#pragma once

#include "../../arch/load_shared.cuh"
#include "../../arch/warp.cuh"
#include "accumulators.cuh"
#include "warp_rows.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
class HeldTile {
 public:
  static constexpr int kPieces = 4, kPieceRows = kWarpRows / kPieces;
  static constexpr uint32_t kRowBytes = kSlabColumns * sizeof(bf16);
  static constexpr uint32_t kSlabBytes = kSubtileM * kRowBytes;
  static constexpr uint32_t kPieceBytes = kPieceRows * kRowBytes;

  // A consumer fills its rows; what was held before must have been read. All that it needs is worked out anew, as
  // accumulators and partial sums leave few registers to the k loop.
  __device__ __forceinline__ static void keep(SharedStorage<kGemm>& smem,
                                              Accumulators<kGemm> const& acc) {
    uint32_t const thread = arch::forgotten(threadIdx.x) - arch::kWarpgroupThreads;
    uint32_t const lane = thread % arch::kWarpThreads;
    uint32_t const rows = arch::shared_address(smem.slabs) +
                          thread / arch::kWarpgroupThreads * (4 * kSlabBytes) +
                          warp_of(thread) * (kWarpRows * kRowBytes) + lane % 16 * kRowBytes +
                          ((lane / 16 ^ lane % 8) << 4);
    TESSERA_UNROLL
    for (int slab = 0; slab < 4; ++slab) {
      fill_warp_rows(rows + slab * kSlabBytes, [&](int i) { return acc.packed(slab, i); });
    }
    __syncwarp();
  }

  // Belongs to the warpgroup that stores, whose warps have the rows of the same warps of a consumer.
  __device__ __forceinline__ explicit HeldTile(SharedStorage<kGemm>& smem)
      : smem_(smem), smem_slabs_(arch::shared_address(smem.slabs)) {
    static_assert(kGemm.epilogue.slabs == 4);
  }
  // Places are those of this consumer's rows.
  __device__ __forceinline__ void of(int consumer) {
    smem_slabs_ = arch::shared_address(smem_.slabs[consumer]);
  }

  // A lane's place in a piece: 8 columns of each slab; the columns of a row are eight lanes'.
  struct Place {
    uint32_t smem;  // in the first slab
    int row;        // among the warp's 16
    int column;     // the first one in a slab

    __device__ __forceinline__ uint4 load(int slab) const {
      return arch::load_shared_16(smem + slab * kSlabBytes);
    }
  };
  __device__ __forceinline__ Place place(int piece) const {
    uint32_t const thread = arch::forgotten(threadIdx.x), lane = thread % arch::kWarpThreads;
    int const chunk = lane % 8;
    int const row = piece * kPieceRows + lane / 8;
    return {.smem = smem_row(thread, row) + ((chunk ^ (row & 7)) << 4),
            .row = row,
            .column = chunk * 8};
  }

  // Gated: 16 columns of gate and the same of up. A lane's two lowest bits say which 16 of a slab, bit 3 which column
  // group, bits 2 and 4 which row. So the eight lanes that shared memory serves at a time have two rows of one slab,
  // whose chunks lie in different banks.
  struct GatedPlace {
    uint32_t smem;  // of the first chunk of gate, in the first piece
    int row;        // among the four of a piece
    int column;     // the first one among the 128 of either half
  };
  __device__ __forceinline__ GatedPlace gated_place() const {
    uint32_t const thread = arch::forgotten(threadIdx.x), lane = thread % arch::kWarpThreads;
    int const row = lane / 4 % 2 + lane / 16 * 2;
    return {.smem = smem_row(thread, row) + gated_group() * (2 * kSlabBytes) +
                    ((2 * gated_quarter() ^ row) << 4),
            .row = row,
            .column = gated_group() * kSlabColumns + gated_quarter() * 16};
  }
  __device__ __forceinline__ static int gated_quarter() { return arch::lane_idx() % 4; }
  __device__ __forceinline__ static int gated_group() { return arch::lane_idx() / 8 % 2; }
  // Eight columns of the first chunk or the second, of gate or of up.
  __device__ __forceinline__ static uint4 load_gated(uint32_t smem, int half, int chunk) {
    return arch::load_shared_16((smem ^ (chunk << 4)) + half * kSlabBytes);
  }
  // The same place in the next piece, which lies `step` further on: its rows are the other four of the eight of a
  // swizzle.
  __device__ __forceinline__ static uint32_t next_piece(uint32_t smem,
                                                        uint32_t step = kPieceBytes) {
    return (smem ^ kPieceRows << 4) + step;
  }
  // Folds the values of the eight lanes that have a row; all lanes call it.
  template <class Fold>
  __device__ __forceinline__ static uint32_t fold_gated_row(uint32_t value, Fold&& fold) {
    TESSERA_UNROLL
    for (int bit : {1, 2, 8}) {
      value = fold(value, __shfl_xor_sync(arch::kAllLanes, value, bit));
    }
    return value;
  }

 private:
  __device__ __forceinline__ static uint32_t warp_of(uint32_t thread) {
    return thread % arch::kWarpgroupThreads / arch::kWarpThreads;
  }
  __device__ __forceinline__ uint32_t smem_row(uint32_t thread, int row) const {
    return smem_slabs_ + (warp_of(thread) * kWarpRows + row) * kRowBytes;
  }

  SharedStorage<kGemm>& smem_;
  uint32_t smem_slabs_;  // of a consumer
};

}  // namespace tessera::cuda::gemm
