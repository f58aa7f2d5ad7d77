// SPDX-License-Identifier: Apache-2.0
// Nanoseconds that pass alike for all SMs of a GPU. GPUs do not share them: compare differences.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

}  // namespace tessera::cuda::arch
