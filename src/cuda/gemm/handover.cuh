// SPDX-License-Identifier: Apache-2.0
// Handover: of two GEMMs the second reads, segment by segment, what the first stores, and starts in the tail of the
// first, on SMs that have run out of tiles (docs/adr/0021-experts-handed-over.md). Tiles come in order of their
// segments, so by then the first `handover_segments` have long been stored, and one word says so:
//   first   every consumer warp counts itself once, when all that it has to store of these segments is in memory
//   second  its producer waits for all of them before the loads of the first tile, and for the end of the first kernel
//           before those of the first tile of another segment
// Model: tests/cuda/handover_model_test.py.
#pragma once

#include <climits>

#include "../arch/bulk_copy.cuh"
#include "../arch/dependent_launch.cuh"
#include "../arch/proxy_fence.cuh"
#include "../arch/signal.cuh"
#include "../arch/warp.cuh"
#include "config.hpp"
#include "params.hpp"
#include "work_tile.hpp"

namespace tessera::cuda::gemm {

// More than a grid has warps. The word may have counted several launches: kernels that run alone, in a bench, leave it.
constexpr uint32_t kHandedOver = 1u << 13;

// The part of a consumer warp of the first kernel. All of its lanes store, or one of them by TMA.
template <GemmConfig kGemm>
class HandsOver {
 public:
  __device__ __forceinline__ explicit HandsOver(GemmParams const& p)
      : p_(p), is_due_(p.gmem_handover != nullptr && arch::lane_idx() == 0) {}

  // The warp has stored all tiles before this one, as segments only grow.
  __device__ __forceinline__ void before(WorkTile const& tile) {
    if (tile.segment >= p_.handover_segments) {
      __syncwarp();
      if (is_due_) count();
      __syncwarp();
    }
  }

  __device__ __forceinline__ void at_end() {
    __syncwarp();
    if (is_due_) count();
  }

 private:
  // One of all warps adds what makes the sum the number that is waited for. An addition, as nobody stands still for it.
  __device__ __forceinline__ void count() {
    arch::bulk_store_wait<0>();
    bool const first = blockIdx.x == 0 && threadIdx.x == arch::kWarpgroupThreads;
    uint32_t const warps = gridDim.x * 4 * kGemm.consumer_warpgroups;
    arch::add_release_gpu(p_.gmem_handover, first ? kHandedOver - warps + 1 : 1);
    is_due_ = false;
  }

  GemmParams const& p_;
  bool is_due_;
};

// The part of a producer warp of the second kernel.
template <GemmConfig kGemm>
class TakesOver {
 public:
  __device__ __forceinline__ explicit TakesOver(GemmParams const& p)
      : p_(p), ready_(p.gmem_handover != nullptr ? 0 : INT_MAX) {}

  // Returns when what the previous kernel stores for the tile's segment may be loaded, by TMA. Called by converged
  // warps.
  __device__ __forceinline__ void wait(WorkTile const& tile) {
    if (tile.segment < ready_) return;
    if (tile.segment < p_.handover_segments) {
      while (arch::load_acquire_gpu(p_.gmem_handover) < kHandedOver) {
      }
      ready_ = p_.handover_segments;
    } else {
      arch::wait_for_previous_kernel();
      ready_ = INT_MAX;
    }
    arch::fence_proxy_async_global();
    __syncwarp();
  }

  // Waits for the end of the previous kernel, as no kernel may end before it.
  __device__ __forceinline__ void at_end() const {
    if (ready_ != INT_MAX) arch::wait_for_previous_kernel();
  }

 private:
  GemmParams const& p_;
  int ready_;  // segments below it may be loaded
};

}  // namespace tessera::cuda::gemm
