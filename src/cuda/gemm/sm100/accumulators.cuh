// SPDX-License-Identifier: Apache-2.0
// A tile's accumulators in tensor memory: whose turn it is, and what an epilogue warp sees of them.
#pragma once

#include "../../arch/sm100/relay.cuh"
#include "../../arch/sm100/tcgen05_descriptor.hpp"
#include "../../arch/sm100/tcgen05_fence.cuh"
#include "../../arch/sm100/tcgen05_ld.cuh"
#include "../../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// Waits for what either CTA of a pair arrives at, or the one CTA.
template <GemmConfig kGemm>
__device__ __forceinline__ void wait_in_pair(arch::Mbarrier* smem_barrier, uint32_t parity) {
  if constexpr (kGemm.cluster_m() == 2) {
    arch::pair_wait(smem_barrier, parity);
  } else {
    arch::mbarrier_wait(smem_barrier, parity);
  }
}

// Names the accumulator of the next tile. `phase` is the parity of the phase of its acc_full that ends then.
class AccumulatorTurn {
 public:
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    index ^= 1;
    phase ^= index == 0 ? 1 : 0;
  }
};

// Columns of tensor memory that the accumulators need, and the scales of all stages, as an allocation has to be.
template <GemmConfig kGemm>
consteval uint32_t tensor_columns() {
  constexpr int kScales = is_mxfp8(kGemm) ? kGemm.stages * kStageScaleColumns : 0;
  constexpr int kNeeded = kAccumulators * kGemm.tile.n + kScales;
  static_assert(kNeeded <= arch::kTensorColumns);
  uint32_t columns = 32;
  while (columns < uint32_t(kNeeded)) columns *= 2;
  return columns;
}

// The 32 rows of an epilogue warp: a thread has one row, 32 columns of it at a time, or a fragment of 16 rows.
template <GemmConfig kGemm>
class AccumulatorRows {
 public:
  __device__ __forceinline__ AccumulatorRows(SharedStorage<kGemm>& smem, AccumulatorTurn turn)
      : smem_(smem),
        turn_(turn),
        tensor_(smem.tensor + static_cast<uint32_t>(turn.index * kGemm.tile.n) +
                arch::tensor_lane(arch::warp_in_warpgroup() * kWarpSlabRows)) {}

  // Waits until the tile is multiplied.
  __device__ __forceinline__ void wait() {
    wait_in_pair<kGemm>(&smem_.acc_full[turn_.index], turn_.phase);
    arch::tcgen05_fence_after();
  }

  // Asks for columns from `column` on; loaded() makes them readable. By converged warps.
  __device__ __forceinline__ void load(uint32_t (&r)[32], int column) const {
    arch::tcgen05_ld_rows(r, tensor_ + static_cast<uint32_t>(column));
  }
  // The same of the `half`-th 16 rows x 64 columns, in the order of fragments (tcgen05_ld_fragments()).
  __device__ __forceinline__ void load_fragments(uint32_t (&r)[32], int half, int column) const {
    arch::tcgen05_ld_fragments(
        r, tensor_ + arch::tensor_lane(half * kWarpSlabRows / 2) + static_cast<uint32_t>(column));
  }
  __device__ __forceinline__ void loaded() const { arch::tcgen05_wait_ld(); }

  // This warp has loaded all that it wants: the next tile but one may be multiplied.
  __device__ __forceinline__ void release() {
    arch::tcgen05_fence_before();
    __syncwarp();
    if (arch::lane_idx() == 0) {
      arch::Mbarrier* const empty = &smem_.acc_empty[turn_.index];
      if constexpr (kGemm.cluster_m() == 2) {
        arch::mbarrier_arrive_cluster(empty, 0);
      } else {
        arch::mbarrier_arrive(empty);
      }
    }
    __syncwarp();
  }

 private:
  SharedStorage<kGemm>& smem_;
  AccumulatorTurn turn_;
  uint32_t tensor_;
};

}  // namespace tessera::cuda::gemm
