// SPDX-License-Identifier: Apache-2.0
// Orders generic-proxy accesses (st, stmatrix, cp.async; ld.acquire) before later accesses by the async
// proxy (wgmma operands, TMA, bulk copies): of shared memory, or of global memory, a peer's included.
#pragma once

namespace tessera::cuda::arch {

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace tessera::cuda::arch
