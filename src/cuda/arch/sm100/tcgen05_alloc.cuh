// SPDX-License-Identifier: Apache-2.0
// Columns of tensor memory are allocated and freed by one converged warp; with kCtas = 2 by one in each CTA of a pair,
// together. A kernel has one kCtas in all of its tcgen05 instructions. All columns are freed before the CTA ends,
// behind a barrier (of the pair) that follows the last access.
#pragma once

#include <cstdint>

#include "../shared_address.cuh"

namespace tessera::cuda::arch {

// `columns`: a power of two from 32 to 512, no more than an earlier allocation of the CTA had. Writes the address to
// `smem_address`; others read it behind a barrier. Waits until so many columns are free.
template <int kCtas>
__device__ __forceinline__ void tcgen05_alloc(uint32_t* smem_address, uint32_t columns) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(smem_address)),
                 "r"(columns)
                 : "memory");
  } else {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                     shared_address(smem_address)),
                 "r"(columns)
                 : "memory");
  }
}

// The CTA allocates nothing any more.
template <int kCtas>
__device__ __forceinline__ void tcgen05_relinquish() {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  } else {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
  }
}

template <int kCtas>
__device__ __forceinline__ void tcgen05_free(uint32_t tensor, uint32_t columns) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tensor), "r"(columns)
                 : "memory");
  } else {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(tensor), "r"(columns)
                 : "memory");
  }
}

}  // namespace tessera::cuda::arch
