// SPDX-License-Identifier: Apache-2.0
// Hand-over inside a pair of CTAs of what cp.async or st wrote to shared memory, for the mma that CTA 0 issues:
//   writers arrive at a barrier of their own CTA | its relay waits there, relay_arrive() at a barrier of CTA 0 | the
//   issuing thread: pair_wait(), mma
// The pair of proxy fences costs nothing in the issuing warp, where an acquire at cluster scope would invalidate L1.
#pragma once

#include <cstdint>

#include "../mbarrier.cuh"

namespace tessera::cuda::arch {

// Publishes what this thread has seen land in its own CTA's shared memory to the async proxy of the pair, and arrives
// at the same barrier in CTA `rank`.
__device__ __forceinline__ void relay_arrive(Mbarrier* smem_barrier, uint32_t rank) {
  asm volatile("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;" ::
                   : "memory");
  mbarrier_arrive_cluster(smem_barrier, rank);
}

// Waits for a phase to which either CTA arrives, and makes what relays published readable by tcgen05 behind it.
__device__ __forceinline__ void pair_wait(Mbarrier* smem_barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(smem_barrier)), "r"(parity)
        : "memory");
  }
  asm volatile("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;" ::
                   : "memory");
}

}  // namespace tessera::cuda::arch
