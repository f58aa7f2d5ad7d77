// SPDX-License-Identifier: Apache-2.0
// tcgen05 instructions of two threads are ordered by: work | fence before | arrive .. wait | fence after | work.
// No machine instruction comes of the fences, but they hold the compiler.
#pragma once

namespace tessera::cuda::arch {

__device__ __forceinline__ void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

}  // namespace tessera::cuda::arch
