// SPDX-License-Identifier: Apache-2.0
// Stores of a consumer warpgroup: 64x64 bf16 slabs, staged in shared memory and written by TMA. A round fills up to
// kSlabs slabs between two barriers of the warpgroup:
//   begin() | fill address(0), address(1), .. | publish() | issuer: store(0, ..) store(1, ..) commit()
// Arithmetic placed after commit() runs while TMA reads the slabs.
//
// A slab that ends past its segment is clipped by the tensor map itself (ragged map, see
// host/tensor_map.hpp): coordinates (column, half, ragged_extent + row - end, end).
#pragma once

#include "../arch/named_barrier.cuh"
#include "../arch/proxy_fence.cuh"
#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// A deferred epilogue works in so many pieces: of 64 rows x 256 columns two column groups, four rows of each warp at a
// time.
constexpr int kDeferredPieces = 2 * 4;

// A slab of fp32 has half as many columns. In shared memory rows of 128 bytes, swizzled:
//   rows-major  one box of 64 rows x 32 columns
//   K-major     two boxes of 32 columns x 32 rows, the transpose
struct Fp32Slab {
  static constexpr int kColumns = 32;
  static constexpr int kBytes = kSubtileM * kColumns * sizeof(float);
  static constexpr int kBoxBytes = kBytes / 2;  // K-major
  static constexpr int kBoxRows = kSubtileM / 2;
};

template <GemmConfig kGemm>
class SlabStore {
 public:
  __device__ __forceinline__ SlabStore(SharedStorage<kGemm>& smem, int consumer)
      : smem_slabs_(&smem.slabs[consumer][0][0]),
        barrier_(kBarrierSlabs + consumer),
        issuer_(static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads == 0) {}

  static constexpr int kSlabs = kGemm.epilogue.slabs;      // of a round
  static constexpr int kPitch = kSubtileM * kSlabColumns;  // from one to the next, in bf16

  // TMA has read the slabs of the last round. Returns the first.
  __device__ __forceinline__ bf16* begin() const {
    if (issuer_) arch::tma_store_wait_read<0>();
    __syncwarp();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
    return smem_slabs_;
  }

  __device__ __forceinline__ void publish() const {
    arch::fence_proxy_async_shared();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
  }

  // The same, then one thread calls store().
  template <class Store>
  __device__ __forceinline__ void publish(Store store) const {
    publish();
    if (issuer_) {
      store();
      commit();
    }
    __syncwarp();
  }

  // The one thread that calls store() and commit(). Outputs leave L2 first: they are larger than it,
  // and the rows of A and B that other CTAs still want are in it.
  __device__ __forceinline__ bool issuer() const { return issuer_; }

  __device__ __forceinline__ void store(int slab, CUtensorMap const* map, int column, int half,
                                        int ragged_row, int end) const {
    arch::tma_store(map, address(slab), column, half, ragged_row, end, arch::l2_evict_first());
  }

  __device__ __forceinline__ void commit() const { arch::tma_store_commit(); }

  // begin() waits for the slabs of the last round, nobody before it.
  __device__ __forceinline__ void settle() const {}
  // Before the CTA exits: TMA has read every slab.
  __device__ __forceinline__ void drain() const {
    if (issuer_) arch::tma_store_wait_read<0>();
  }

  __device__ __forceinline__ bf16* address(int slab) const {
    return smem_slabs_ + slab * kSubtileM * kSlabColumns;
  }

 private:
  bf16* smem_slabs_;
  int barrier_;
  bool issuer_;
};

}  // namespace tessera::cuda::gemm
