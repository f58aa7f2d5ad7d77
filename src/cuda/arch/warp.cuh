// SPDX-License-Identifier: Apache-2.0
// A thread's lane, warp and warpgroup, the latter two uniform across the warp so that role branches
// compile to uniform ones.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;  // of a warp, as shuffles and votes take them

__device__ __forceinline__ int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpThreads; }

__device__ __forceinline__ int warp_idx() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
}

__device__ __forceinline__ int warpgroup_idx() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}

// Returns the place of the warp among the four of its warpgroup.
__device__ __forceinline__ int warp_in_warpgroup() {
  return static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpThreads;
}

// The same value, of which the compiler knows nothing: what follows from it is worked out anew each time, and kept in
// no register meanwhile.
__device__ __forceinline__ uint32_t forgotten(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace tessera::cuda::arch
