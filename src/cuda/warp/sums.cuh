// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the lanes of a warp.
#pragma once

#include "../arch/shared_address.cuh"
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

}  // namespace tessera::cuda::warp
