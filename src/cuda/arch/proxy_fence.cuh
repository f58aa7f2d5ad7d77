// SPDX-License-Identifier: Apache-2.0
// Orders generic-proxy accesses to shared memory (st, stmatrix, cp.async) before later accesses by
// the async proxy (wgmma operands, TMA stores).
#pragma once

namespace tessera::cuda::arch {

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tessera::cuda::arch
