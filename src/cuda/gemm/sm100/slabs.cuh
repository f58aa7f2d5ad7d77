// SPDX-License-Identifier: Apache-2.0
// Stores of an epilogue warp: 32 rows x 64 bf16 columns go to a slab of shared memory, where a thread writes its row,
// and from there by TMA. There are two slabs, so that one is filled while the other one is read:
//   begin() | put(chunk, 8 columns) .. | store(map, coordinates)
// The lane that stores is the one that waits: election among the same lanes has the same outcome.
// A slab that ends past its segment is clipped by the tensor map, as on sm_90 (gemm/sm90/slab_store.cuh).
#pragma once

#include "../../arch/proxy_fence.cuh"
#include "../../arch/store_shared.cuh"
#include "../../arch/tma.cuh"
#include "../../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
class WarpSlabs {
 public:
  __device__ __forceinline__ explicit WarpSlabs(SharedStorage<kGemm>& smem)
      : smem_slabs_(smem.slabs[arch::warp_in_warpgroup()][0]) {}

  // TMA has read what the slab held.
  __device__ __forceinline__ void begin() {
    if (arch::elect_one()) arch::tma_store_wait_read<kWarpSlabs - 1>();
    __syncwarp();
  }

  // Columns 8 chunk .. + 7 of this thread's row; swizzled, without bank conflicts.
  __device__ __forceinline__ void put(int chunk, uint4 columns) const {
    int const row = arch::lane_idx();
    arch::store_shared_16(
        arch::shared_address(slab()) + row * kStageRowBytes + ((chunk ^ (row & 7)) << 4), columns);
  }

  __device__ __forceinline__ void store(CUtensorMap const* map, int column, int half,
                                        int ragged_row, int end) {
    arch::fence_proxy_async_shared();
    __syncwarp();
    if (arch::elect_one()) {
      arch::tma_store(map, slab(), column, half, ragged_row, end, arch::l2_evict_first());
      arch::tma_store_commit();
    }
    __syncwarp();
    next_ ^= 1;
  }

  // Before the CTA exits: TMA has read every slab.
  __device__ __forceinline__ void drain() const {
    if (arch::elect_one()) arch::tma_store_wait_read<0>();
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bf16* slab() const {
    return smem_slabs_ + next_ * kWarpSlabRows * kSlabColumns;
  }

  bf16* smem_slabs_;
  int next_ = 0;
};

}  // namespace tessera::cuda::gemm
