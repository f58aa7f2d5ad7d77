// SPDX-License-Identifier: Apache-2.0
// Stages of the ring that the producer lends to a tile's epilogue, after its k_tiles: filled with what the
// epilogue reads, or empty, and always large enough to stage what it stores. Nobody waits for a buffer of its own,
// reads are under way before the k loop ends, and between epilogues the same memory holds operands.
//   producer         wait empty[s] | Epilogue::lend() fills s, or not | full[s]
//   each warp alone  wait full[s] | read and write its rows | store | once TMA has read them arrive on empty[s]: after
//                    the next stage's stores, for the tile's last stage under the first k_tile of the next
// A lent stage holds slabs of 64 columns (128 bytes) for the tile's rows: tile_n/tile_m in B's place, and one in A's.
#pragma once

#include <type_traits>

#include "../../arch/named_barrier.cuh"
#include "../../arch/proxy_fence.cuh"
#include "../../arch/tma.cuh"
#include "../ring.cuh"
#include "../slabs.cuh"
#include "slab_fill.cuh"

namespace tessera::cuda::gemm {

// The lent stages as one warp of a consumer warpgroup sees them.
template <GemmConfig kGemm>
class BorrowedStages {
 public:
  __device__ __forceinline__ BorrowedStages(SharedStorage<kGemm>& smem, int consumer)
      : smem_(smem) {
    subtile_offset_ = consumer * kSubtileM * kSlabColumns;
    warp_offset_ = arch::warp_in_warpgroup() * kWarpRows * kSlabColumns;
  }

  __device__ __forceinline__ int take(PipelineState<kGemm>& state) const {
    int const stage = state.stage;
    arch::mbarrier_wait(&smem_.full[stage], state.phase);
    state.advance();
    return stage;
  }

  // All of the tile's rows of a slab, for who lends.
  __device__ __forceinline__ static bf16* tile_slab_b(SharedStorage<kGemm>& smem, int stage,
                                                      int slab) {
    static_assert(kGemm.tile.n % kGemm.tile.m == 0);
    return &smem.b[stage][slab * kGemm.tile.m * kSlabColumns];
  }

  // The warpgroup's 64 rows of a slab, as SlabRows takes them.
  __device__ __forceinline__ bf16* slab_b(int stage, int slab) const {
    return tile_slab_b(smem_, stage, slab) + subtile_offset_;
  }
  __device__ __forceinline__ bf16* slab_a(int stage) const {
    return &smem_.a[stage][subtile_offset_];
  }
  // This warp's 16 of them, as TMA stores them.
  __device__ __forceinline__ bf16* rows(bf16* slab) const { return slab + warp_offset_; }

  // The warp has written `stage`: lane 0 calls store(), which issues TMA stores, and gives the one before back.
  template <class Store>
  __device__ __forceinline__ void publish(int stage, Store store) {
    arch::fence_proxy_async_shared();
    __syncwarp();
    if (arch::lane_idx() == 0) publish_by_lane(store);
    __syncwarp();
    held_ = stage;
  }

  // Does so for a warpgroup that writes slabs together: its first warp stores them.
  template <class Store>
  __device__ __forceinline__ void publish_together(int stage, int barrier, Store store) {
    arch::fence_proxy_async_shared();
    arch::named_barrier_sync(barrier, arch::kWarpgroupThreads);
    bool const stores = warp_offset_ == 0;
    if (arch::lane_idx() == 0) {
      if (stores) {
        publish_by_lane(store);
      } else {
        free(stage);
      }
    }
    __syncwarp();
    held_ = stores ? stage : kNone;
  }

  // Gives the last stage back, at the latest before the warp waits for a stage of its next tile but the first.
  __device__ __forceinline__ void settle() {
    if (arch::lane_idx() == 0) give_back<0>();
    held_ = kNone;
    __syncwarp();
  }

  __device__ __forceinline__ void drain() const {
    if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();
  }

 private:
  static constexpr int kNone = -1;

  template <class Store>
  __device__ __forceinline__ void publish_by_lane(Store store) const {
    store();
    arch::tma_store_commit();
    give_back<1>();
  }

  // All stores but those of the last kLater stages have been read.
  template <int kLater>
  __device__ __forceinline__ void give_back() const {
    if (held_ == kNone) return;
    arch::tma_store_wait_read<kLater>();
    free(held_);
  }

  // One lane calls it. Paired, an arrival publishes nothing: what the warp wrote there has been read, by itself or by
  // TMA.
  __device__ __forceinline__ void free(int stage) const {
    if constexpr (kGemm.paired()) {
      TESSERA_UNROLL
      for (int cta = 0; cta < kGemm.cluster.ctas; ++cta) {
        arch::mbarrier_arrive_cluster(&smem_.empty[stage], static_cast<uint32_t>(cta));
      }
    } else {
      arch::mbarrier_arrive(&smem_.empty[stage]);
    }
  }

  SharedStorage<kGemm>& smem_;
  int subtile_offset_, warp_offset_;
  int held_ = kNone;  // stage that TMA may still read
};

// Staging of a warpgroup in lent stages, as SlabStore is in slabs of its own.
template <GemmConfig kGemm>
class LentSlabs {
 public:
  static constexpr int kSlabs = kGemm.tile.n / kGemm.tile.m;  // of a round
  static constexpr int kPitch = kGemm.tile.m * kSlabColumns;  // from one to the next, in bf16

  __device__ __forceinline__ LentSlabs(SharedStorage<kGemm>& smem, int consumer)
      : stages_(smem, consumer), barrier_(kBarrierSlabs + consumer) {}

  // The warpgroup's rows of a round's first slab.
  __device__ __forceinline__ bf16* begin(PipelineState<kGemm>& ring) {
    stage_ = stages_.take(ring);
    return stages_.slab_b(stage_, 0);
  }

  template <class Store>
  __device__ __forceinline__ void publish(Store store) {
    stages_.publish_together(stage_, barrier_, store);
  }

  __device__ __forceinline__ void settle() { stages_.settle(); }
  __device__ __forceinline__ void drain() const { stages_.drain(); }

 private:
  BorrowedStages<kGemm> stages_;
  int barrier_;
  int stage_ = 0;
};

template <GemmConfig kGemm>
using Staging = std::conditional_t<kGemm.lends(), LentSlabs<kGemm>, SlabStore<kGemm>>;

}  // namespace tessera::cuda::gemm
