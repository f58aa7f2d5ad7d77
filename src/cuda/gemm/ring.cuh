// SPDX-License-Identifier: Apache-2.0
// The ring of stages between producer and consumers, and the B that stays. Model: tests/cuda/ring_model_test.py.
//   producer: wait empty[s], fill s, (bytes and arrivals end) full[s]
//   consumer: wait full[s], multiply, arrive on empty[s] of every CTA that fills it
// b_behind: B has a stage less than A. What frees the A of a k_tile also frees the B of the k_tile before it:
//   producer: wait empty[s], fill B of the k_tile before, fill A; behind a tile's last A wait once more, fill its B
// With resident_k_tiles the stages hold A alone. A run is tiles of one segment and n_tile: its B is loaded in the
// first tile, k_tile by k_tile as the last tiles of the run before, one for each warpgroup, have multiplied them.
#pragma once

#include "../arch/cluster.cuh"
#include "../arch/mbarrier.cuh"
#include "../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// Position in the ring. `phase` is the parity that full[stage] completes with on this lap.
template <GemmConfig kGemm>
class PipelineState {
 public:
  int stage = 0;
  uint32_t phase = 0;

  // Returns the stage that holds the stage's B.
  __device__ __forceinline__ int b_stage() const { return kGemm.b_behind() ? b_stage_ : stage; }

  __device__ __forceinline__ void advance() {
    if (++stage == kGemm.stages) {
      stage = 0;
      phase ^= 1;
    }
    if (kGemm.b_behind() && ++b_stage_ == kGemm.b_buffers()) b_stage_ = 0;
  }

  // Skips the stages of a tile that the other ping-pong warpgroup consumes.
  __device__ __forceinline__ void advance(int k_tiles) {
    int const position = stage + k_tiles;
    phase ^= (position / kGemm.stages) & 1;
    stage = position % kGemm.stages;
  }

 private:
  int b_stage_ = 0;  // b_behind
};

// Called by one thread; a cluster or CTA barrier must follow.
template <GemmConfig kGemm>
__device__ __forceinline__ void init_pipeline(SharedStorage<kGemm>& smem) {
  constexpr BarrierArrivals kArrivals = barrier_arrivals(kGemm);
  for (int s = 0; s < kGemm.stages; ++s) {
    arch::mbarrier_init(&smem.full[s], kArrivals.full);
    arch::mbarrier_init(&smem.empty[s], kArrivals.empty);
  }
  for (int k_tile = 0; k_tile < kGemm.resident_k_tiles(); ++k_tile) {
    arch::mbarrier_init(&smem.resident_full[k_tile], 1);
    arch::mbarrier_init(&smem.resident_empty[k_tile], kArrivals.resident_empty);
  }
  if constexpr (kGemm.schedules_apart()) arch::mbarrier_init(&smem.draw, 1);
  for (int w = 0; w < kWorkSlots; ++w) {
    arch::mbarrier_init(&smem.work_full[w], kArrivals.work_full);
    arch::mbarrier_init(&smem.work_empty[w], kArrivals.work_empty);
    if constexpr (kGemm.cluster_m() > 1) {
      arch::mbarrier_arrive_expect_tx(&smem.work_full[w], sizeof(int4));
    }
  }
  for (int warp = 0; warp < 4 * kGemm.consumer_warpgroups; ++warp) {
    for (int b = 0; b < kLoadBuffers; ++b) arch::mbarrier_init(&smem.loads[warp][b], 1);
  }
  arch::mbarrier_fence_init();
}

// Producer: the stage may be overwritten, here and, if something is multicast, in the peers.
template <GemmConfig kGemm>
__device__ __forceinline__ void wait_empty(SharedStorage<kGemm>& smem,
                                           PipelineState<kGemm> const& state) {
  arch::mbarrier_wait(&smem.empty[state.stage], state.phase ^ 1);
}

// Consumer warpgroup, by its warp 0 or, warps_release(), by all, once its wgmmas on the stage have completed; to every
// CTA that fills it.
template <GemmConfig kGemm>
__device__ __forceinline__ void release_stage(SharedStorage<kGemm>& smem, int stage) {
  int const thread = kGemm.warps_release()
                         ? arch::lane_idx()
                         : static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  if constexpr (kGemm.cluster.ctas == 1) {
    if (thread == 0) arch::mbarrier_arrive(&smem.empty[stage]);
  } else {
    if (thread < kGemm.cluster.ctas) arch::mbarrier_arrive_cluster(&smem.empty[stage], thread);
  }
}

// Consumer warpgroup, by its warp 0: it needs no more of this k_tile of the run's B.
template <GemmConfig kGemm>
__device__ __forceinline__ void release_resident(SharedStorage<kGemm>& smem, int k_tile) {
  if (static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads == 0) {
    arch::mbarrier_arrive(&smem.resident_empty[k_tile]);
  }
}

}  // namespace tessera::cuda::gemm
