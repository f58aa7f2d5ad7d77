// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the lanes of a warp, and over the threads of a CTA.
#pragma once

#include "../arch/shared_address.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"

namespace tessera::cuda::warp {

// The sum of `own` over the lanes up to this one. By a converged warp.
__device__ __forceinline__ int inclusive_sum(int own) {
  TESSERA_UNROLL
  for (int step = 1; step < arch::kWarpThreads; step *= 2) {
    int const lower = __shfl_up_sync(arch::kAllLanes, own, step);
    if (arch::lane_idx() >= step) own += lower;
  }
  return own;
}

// The sums of `own` over the threads ahead of this one and over all of a CTA of kWarps warps. One barrier; another one
// comes before the next call.
struct CtaSums {
  int before, all;
};
template <int kWarps>
__device__ __forceinline__ CtaSums sums_over_cta(int own) {
  static_assert(kWarps <= arch::kWarpThreads, "a lane per warp");
  TESSERA_STATIC_SHARED(smem_sums, int[kWarps]);
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads, lane = arch::lane_idx();
  int const up_to = inclusive_sum(own);
  if (lane == arch::kWarpThreads - 1) smem_sums[warp] = up_to;
  __syncthreads();
  int const of_warps = inclusive_sum(lane < kWarps ? smem_sums[lane] : 0);
  int const earlier = __shfl_sync(arch::kAllLanes, of_warps, max(warp - 1, 0));
  return {(warp > 0 ? earlier : 0) + up_to - own,
          __shfl_sync(arch::kAllLanes, of_warps, kWarps - 1)};
}

}  // namespace tessera::cuda::warp
