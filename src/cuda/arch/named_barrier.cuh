// SPDX-License-Identifier: Apache-2.0
// Named barriers: rendezvous of part of a CTA. Threads are counted by whole warps; barrier 0 is
// __syncthreads.
#pragma once

namespace tessera::cuda::arch {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this thread in without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace tessera::cuda::arch
