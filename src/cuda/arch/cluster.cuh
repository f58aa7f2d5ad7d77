// SPDX-License-Identifier: Apache-2.0
// Clusters of CTAs: rank, the barrier of all their threads, and stores into a peer's memory.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

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

// Stores 16 bytes to `smem_dst` in CTA `rank` and reports them to `smem_barrier` there.
__device__ __forceinline__ void st_async(int4* smem_dst, Mbarrier* smem_barrier, uint32_t rank,
                                         int4 value) {
  asm volatile(
      "{\n"
      ".reg .b32 dst, barrier;\n"
      "mapa.shared::cluster.u32 dst, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [dst], "
      "{%3, %4, %5, %6}, [barrier];\n"
      "}" ::"r"(shared_address(smem_dst)),
      "r"(shared_address(smem_barrier)), "r"(rank), "r"(value.x), "r"(value.y), "r"(value.z),
      "r"(value.w)
      : "memory");
}

}  // namespace tessera::cuda::arch
