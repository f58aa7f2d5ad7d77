// SPDX-License-Identifier: Apache-2.0
// Slabs of an epilogue warp in shared memory: 32 rows x 128 bytes, of which a thread writes its row, and which TMA
// stores. The lane that stores is the one that waits: election among the same lanes has the same outcome.
// A slab that ends past its segment is clipped by the tensor map, as on sm_90 (gemm/slabs.cuh).
#pragma once

#include "../../arch/load_shared.cuh"
#include "../../arch/proxy_fence.cuh"
#include "../../arch/store_shared.cuh"
#include "../../arch/tma.cuh"
#include "../../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// Both kinds of use below have this in common.
template <GemmConfig kGemm>
class SlabsOfWarp {
 public:
  static constexpr int kSlabs = kGemm.epilogue.slabs;

  __device__ __forceinline__ bf16* slab(int i) const {
    return smem_slabs_ + i * kWarpSlabRows * kSlabColumns;
  }

  // At most `kPending` of the stores that are under way have not read their slabs.
  template <int kPending>
  __device__ __forceinline__ void wait_read() const {
    if (arch::elect_one()) arch::tma_store_wait_read<kPending>();
    __syncwarp();
  }

  // store() by one lane, of what all lanes have written.
  template <class Store>
  __device__ __forceinline__ void publish(Store store) const {
    arch::fence_proxy_async_shared();
    __syncwarp();
    if (arch::elect_one()) {
      store();
      arch::tma_store_commit();
    }
    __syncwarp();
  }

  // Before the CTA exits: TMA has read every slab.
  __device__ __forceinline__ void drain() const { wait_read<0>(); }

 protected:
  __device__ __forceinline__ explicit SlabsOfWarp(SharedStorage<kGemm>& smem)
      : smem_slabs_(smem.slabs[arch::warp_in_warpgroup()][0]) {}

  // Chunk `chunk`, 16 bytes, of this thread's row; swizzled, without bank conflicts.
  __device__ __forceinline__ static uint32_t place(bf16 const* slab, int chunk) {
    int const row = arch::lane_idx();
    return arch::shared_address(slab) + row * kStageRowBytes + ((chunk ^ (row & 7)) << 4);
  }

 private:
  bf16* smem_slabs_;
};

// Slabs are filled in turn, so that one is filled while the others are read:
//   begin() | put(chunk, 16 bytes) .. | store(map, coordinates)
template <GemmConfig kGemm>
class WarpSlabs : public SlabsOfWarp<kGemm> {
  using Base = SlabsOfWarp<kGemm>;

 public:
  __device__ __forceinline__ explicit WarpSlabs(SharedStorage<kGemm>& smem) : Base(smem) {}

  // Waits until TMA has read what the slab held. Returns the slab.
  __device__ __forceinline__ bf16* begin() {
    this->template wait_read<Base::kSlabs - 1>();
    return current();
  }

  __device__ __forceinline__ void put(int chunk, uint4 columns) const {
    arch::store_shared_16(Base::place(current(), chunk), columns);
  }

  __device__ __forceinline__ void store(CUtensorMap const* map, int column, int half,
                                        int ragged_row, int end) {
    store([&](bf16 const* slab) {
      arch::tma_store(map, slab, column, half, ragged_row, end, arch::l2_evict_first());
    });
  }
  // put(slab): by TMA.
  template <class Put>
  __device__ __forceinline__ void store(Put put) {
    this->publish([&] { put(current()); });
    if (++next_ == Base::kSlabs) next_ = 0;
  }

 private:
  __device__ __forceinline__ bf16* current() const { return this->slab(next_); }

  int next_ = 0;
};

// TMA also fills slabs: blocks of work take two buffers in turn, which come with what the block changes in place. Slabs
// that are left over are stored beside them.
//   load(0), load(1) | block b: wait(b) | get, put .. | stores of block b - 1 have been read: load(b + 1) | get, put ..
//   | publish()
template <GemmConfig kGemm>
class LoadedWarpSlabs : public SlabsOfWarp<kGemm> {
  using Base = SlabsOfWarp<kGemm>;

 public:
  static constexpr int kBufferSlabs = Base::kSlabs / kLoadBuffers;
  static constexpr int kLeftOver = kLoadBuffers * kBufferSlabs;  // the first of the others

  __device__ __forceinline__ explicit LoadedWarpSlabs(SharedStorage<kGemm>& smem)
      : Base(smem), loads_(smem.loads[arch::warp_in_warpgroup()]) {}

  __device__ __forceinline__ static int buffer_of(int block) { return block % kLoadBuffers; }
  __device__ __forceinline__ bf16* slab_of(int block, int i) const {
    return this->slab(buffer_of(block) * kBufferSlabs + i);
  }

  // One lane calls it where the buffer has been read. fetch(slab, i, barrier) has TMA load the i-th slab of the block.
  template <class Fetch>
  __device__ __forceinline__ void load(int block, Fetch fetch) const {
    constexpr uint32_t kBytes = kBufferSlabs * kWarpSlabRows * kStageRowBytes;
    arch::Mbarrier* const full = &loads_[buffer_of(block)];
    arch::mbarrier_arrive_expect_tx(full, kBytes);
    TESSERA_UNROLL
    for (int i = 0; i < kBufferSlabs; ++i) fetch(slab_of(block, i), i, full);
  }

  // Waits until the block's slabs have landed.
  __device__ __forceinline__ void wait(int block) {
    int const buffer = buffer_of(block);
    arch::mbarrier_wait(&loads_[buffer], phase_ >> buffer & 1);
    phase_ ^= 1u << buffer;
  }

  __device__ __forceinline__ uint4 get(bf16 const* slab, int chunk) const {
    return arch::load_shared_16(Base::place(slab, chunk));
  }
  __device__ __forceinline__ void put(bf16* slab, int chunk, uint4 columns) const {
    arch::store_shared_16(Base::place(slab, chunk), columns);
  }

 private:
  arch::Mbarrier* loads_;
  uint32_t phase_ = 0;  // bit b: parity of the next load into buffer b
};

}  // namespace tessera::cuda::gemm
