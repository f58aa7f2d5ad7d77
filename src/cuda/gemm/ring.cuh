// SPDX-License-Identifier: Apache-2.0
// The ring of stages between producer and consumers, and the B that stays. Model: tests/cuda/ring_model_test.py.
//   producer: wait empty[s], fill s, (bytes and arrivals end) full[s]
//   consumer: wait full[s], multiply, arrive on empty[s] of every CTA that fills it
// b_behind: B has a stage less than A. What frees the A of a k_tile also frees the B of the k_tile before it:
//   producer: wait empty[s], fill B of the k_tile before, fill A; behind a tile's last A wait once more, fill its B
// Where B is resident the stages hold A alone. A run is several tiles of one segment and n_tile. Its B is loaded in the
// first tile, each k_tile once the last tiles of the previous run, one for each warpgroup, have multiplied its place.
#pragma once

#include "../arch/cluster.cuh"
#include "../arch/mbarrier.cuh"
#include "../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// A position in the ring. `phase` is the parity of the phase of full[stage] that ends on this lap.
template <GemmConfig kGemm>
class PipelineState {
 public:
  int stage = 0;
  uint32_t phase = 0;

  // Returns the stage in which B of this k_tile lies.
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

// The producer waits until the stage may be overwritten here and, if something is multicast, in the other CTAs.
template <GemmConfig kGemm>
__device__ __forceinline__ void wait_empty(SharedStorage<kGemm>& smem,
                                           PipelineState<kGemm> const& state) {
  arch::mbarrier_wait(&smem.empty[state.stage], state.phase ^ 1);
}

// A consumer warpgroup frees the stage in every CTA that fills it, once its wgmmas on the stage have completed. Its
// warp 0 calls it or, if warps_release(), every warp.
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

// Warp 0 of a consumer warpgroup calls it when the warpgroup has no more use for this k_tile of the run's B.
template <GemmConfig kGemm>
__device__ __forceinline__ void release_resident(SharedStorage<kGemm>& smem, int k_tile) {
  if (static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads == 0) {
    arch::mbarrier_arrive(&smem.resident_empty[k_tile]);
  }
}

}  // namespace tessera::cuda::gemm
