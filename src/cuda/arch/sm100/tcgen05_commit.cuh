// SPDX-License-Identifier: Apache-2.0
// tcgen05.commit: one arrival at an mbarrier once all earlier mma and cp of this thread have completed, which includes
// that their operands in shared memory have been read. It implies tcgen05.fence::before_thread_sync.
#pragma once

#include <cstdint>

#include "../mbarrier.cuh"

namespace tessera::cuda::arch {

// kCtas = 2: at the same place in both CTAs of the pair.
template <int kCtas>
__device__ __forceinline__ void tcgen05_commit(Mbarrier* smem_barrier) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
            shared_address(smem_barrier))
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;" ::"r"(shared_address(smem_barrier)),
        "h"(static_cast<uint16_t>(3))
        : "memory");
  }
}

}  // namespace tessera::cuda::arch
