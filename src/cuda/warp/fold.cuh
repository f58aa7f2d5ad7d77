// SPDX-License-Identifier: Apache-2.0
// Reductions over the lanes of a warp by halves 16, 8, 4, 2, 1: the order of core::warp_sum. Every lane gets
// the result. Of kLanes neighbours alone: the same bits as if the other lanes of a whole warp held zeros, of
// a largest value -inf.
#pragma once

#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"

namespace tessera::cuda::warp {

template <int kLanes = arch::kWarpThreads>
__device__ __forceinline__ float fold_sum(float value) {
  TESSERA_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(arch::kAllLanes, value, half);
  }
  return value;
}

template <int kLanes = arch::kWarpThreads>
__device__ __forceinline__ float fold_max(float value) {
  TESSERA_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    value = fmaxf(value, __shfl_xor_sync(arch::kAllLanes, value, half));
  }
  return value;
}

}  // namespace tessera::cuda::warp
