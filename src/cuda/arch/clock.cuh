// SPDX-License-Identifier: Apache-2.0
// Nanoseconds that pass alike for all SMs of a GPU, and sleep. GPUs do not share them: compare differences.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// For up to twice as long. Warps of all SMs that sleep equally long seem to wake at the same moments
// (docs/notebook/2026-11-23-fused-draws.md).
__device__ __forceinline__ void sleep_ns(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory");
}

}  // namespace tessera::cuda::arch
