// SPDX-License-Identifier: Apache-2.0
// Rows of fp32 held for an epilogue that works under the next tile's k loop. Nothing rounds a tile of 64 KB per
// warpgroup, so it is held as
//   pieces 0 to 3  in slabs of their own, which takes a stage of B off the ring
//   pieces 4 to 7  in 64 registers, until TMA has read the slabs; then they take their places
// and TMA gets one piece behind some k_tile of the next tile, from warp w pieces w and w + 4. The pace is the point:
// additions to what is not in L2 take all SMs together a third of the bandwidth of stores, 5.5 bytes a cycle and SM;
// with all of a tile at once they fill the way to L2 for most of the next tile's k loop, on which its loads come late.
//   consumers | keep: wait read | fill 0-3, fence | mma .. piece 0 .. 3 .. | wait read | fill 4-7, fence | .. piece 7
// Lesson 10 of docs/lessons.md. Model: tests/cuda/pace_model_test.py.
#pragma once

#include "../../arch/named_barrier.cuh"
#include "../../arch/proxy_fence.cuh"
#include "../../arch/tma.cuh"
#include "../../arch/warp.cuh"
#include "deferred.cuh"
#include "sum_slab.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm, Major kMajor>
class DeferredSums {
 public:
  __device__ __forceinline__ DeferredSums(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]), barrier_(kBarrierSlabs + consumer) {
    static_assert(kGemm.epilogue.slabs == kSlabs && kGemm.column_groups() == 2);
  }

  // 64 rows. What was held before must have been worked on.
  __device__ __forceinline__ void keep(Accumulators<kGemm>& acc) {
    // The exclusive or with a zero that ptxas does not know hides the copy from it (lesson 8).
    uint32_t const zero = threadIdx.x >> 16;
    float const(&second)[kHalf] = Fragments::of(acc, 1);
    TESSERA_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      later_[i] = __uint_as_float(__float_as_uint(second[i]) ^ zero);
    }
    fill_slabs(Fragments::of(acc, 0));
  }

  // Pieces of 32 columns, in their order. store(smem): one thread hands to TMA what lies there, and commits.
  template <class Store>
  __device__ __forceinline__ void take(int piece, Store store) {
    if (piece == kSlabs) fill_slabs(later_);
    int const place = piece % kSlabs;
    if (arch::warp_in_warpgroup() == place && arch::lane_idx() == 0) store(slab(place));
    __syncwarp();
  }

  __device__ __forceinline__ void drain() const {
    if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();
  }

 private:
  using Slab = SumSlab<kGemm, kMajor>;
  static constexpr int kSlabs = 4;  // a warp's each
  static constexpr int kHalf = kSlabs * Slab::kValues;
  static_assert(2 * kSlabs == kDeferredPieces);

  __device__ __forceinline__ bf16* slab(int i) const {
    return smem_slabs_ + i * (Fp32Slab::kBytes / sizeof(bf16));
  }

  __device__ __forceinline__ void fill_slabs(float const (&values)[kHalf]) const {
    drain();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
    TESSERA_UNROLL
    for (int i = 0; i < kSlabs; ++i) Slab::fill(&values[i * Slab::kValues], slab(i));
    arch::fence_proxy_async_shared();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
  }

  bf16* smem_slabs_;
  int barrier_;
  float later_[kHalf];  // pieces 4 to 7
};

}  // namespace tessera::cuda::gemm
