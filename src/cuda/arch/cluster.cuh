// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: rank, number, and the barrier of all their threads.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

}  // namespace tessera::cuda::arch
