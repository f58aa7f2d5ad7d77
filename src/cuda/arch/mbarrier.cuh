// SPDX-License-Identifier: Apache-2.0
// mbarrier: a phase ends when `arrivals` arrivals were counted and every expected byte has landed.
// A waiter names the parity of the phase it waits for; the first phase has parity 0, so a wait for
// parity 1 on a fresh barrier returns at once (how producers see an empty ring).
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace tessera::cuda::arch {

using Mbarrier = uint64_t;

__device__ __forceinline__ void mbarrier_init(Mbarrier* smem_barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(smem_barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes the inits visible to the async proxy and to the other CTAs of the cluster; a CTA or cluster
// barrier must follow.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier* smem_barrier) {
  asm volatile(
      "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(smem_barrier))
      : "memory");
}

// The same barrier in CTA `rank` of the cluster. Relaxed: it hands back a buffer that the caller only
// read, and those reads are complete (wgmma_wait), so there is nothing to publish. A release at
// cluster scope would cost a MEMBAR.GPU per call. Do not use it to hand over data.
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier* smem_barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(smem_barrier)),
      "r"(rank)
      : "memory");
}

// One arrival, and `bytes` more to land before the phase can end.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* smem_barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(smem_barrier)),
               "r"(bytes)
               : "memory");
}

// Acquires, at CTA scope, what local arrivals released and what landed by complete_tx here. (Cluster
// scope would invalidate L1 each time; remote arrivals carry no data, see above.)
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier* smem_barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(smem_barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// The same, but back at once.
__device__ __forceinline__ bool mbarrier_test_wait(Mbarrier* smem_barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(smem_barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// As try_wait, at cluster scope, for values that a peer stored (st_async). Invalidates L1.
__device__ __forceinline__ bool mbarrier_try_wait_cluster(Mbarrier* smem_barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(smem_barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier* smem_barrier, uint32_t parity) {
  while (!mbarrier_try_wait_cluster(smem_barrier, parity)) {
  }
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* smem_barrier, uint32_t parity) {
  while (!mbarrier_try_wait(smem_barrier, parity)) {
  }
}

}  // namespace tessera::cuda::arch
