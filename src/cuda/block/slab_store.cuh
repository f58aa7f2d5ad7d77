// SPDX-License-Identifier: Apache-2.0
// Stores of a consumer warpgroup: 64x64 bf16 slabs, staged in shared memory through stmatrix and
// written by TMA, a ring of them so that the next slab is filled while the last ones drain.
//
// A slab that ends past its segment is clipped by the tensor map itself (ragged map, see
// host/tensor_map.hpp): coordinates (column, half, ragged_extent + row - end, end).
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/named_barrier.cuh"
#include "../arch/proxy_fence.cuh"
#include "../arch/stmatrix.cuh"
#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "shared_storage.cuh"

namespace tessera::cuda::block {

template <GemmConfig kGemm>
class SlabStore {
 public:
  __device__ __forceinline__ SlabStore(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]), barrier_(kBarrierSlabs + consumer) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const lane = thread % arch::kWarpThreads;
    issuer_ = thread == 0;
    // Matrix lane/8 of an x4: bit 0 selects the lower 8 rows, bit 1 the right 8 columns.
    int const row = thread / arch::kWarpThreads * 16 + (lane / 8 & 1) * 8 + lane % 8;
    row_offset_ = row * 128;
    chunk_ = lane / 16;
    swizzle_ = row & 7;
  }

  // pair(j, half): this thread's two values of columns 8j + 2(lane%4) + {0,1}, packed, of row lane/4
  // (half 0) or lane/4 + 8 (half 1) of its warp's 16 rows.
  template <typename Pair>
  __device__ __forceinline__ void store(CUtensorMap const* map, int c0, int c1, int c2, int c3,
                                        Pair pair) {
    if (issuer_) arch::tma_store_wait_read<kGemm.store_slabs - 1>();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
    bf16* const smem_slab = smem_slabs_ + ring_ * kSubtileM * kSlabColumns;
    uint32_t const smem_row = arch::shared_address(smem_slab) + row_offset_;
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; j += 2) {
      arch::stmatrix_x4(smem_row + (((j + chunk_) ^ swizzle_) << 4), pair(j, 0), pair(j, 1),
                        pair(j + 1, 0), pair(j + 1, 1));
    }
    arch::fence_proxy_async_shared();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
    if (issuer_) {
      arch::tma_store(map, smem_slab, c0, c1, c2, c3);
      arch::tma_store_commit();
    }
    ring_ = ring_ + 1 == kGemm.store_slabs ? 0 : ring_ + 1;
  }

  // Before the CTA exits: TMA has read every slab.
  __device__ __forceinline__ void drain() const {
    if (issuer_) arch::tma_store_wait_read<0>();
  }

 private:
  bf16* smem_slabs_;
  int barrier_;
  bool issuer_;
  int row_offset_;
  int chunk_;
  int swizzle_;
  int ring_ = 0;
};

}  // namespace tessera::cuda::block
