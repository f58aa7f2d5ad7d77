// SPDX-License-Identifier: Apache-2.0
// cp.async.bulk: one thread copies a run of bytes between shared memory and any global address, a
// peer's included. Addresses and sizes are multiples of 16. Loads report their bytes to an mbarrier;
// stores are tracked in groups of the issuing thread (tma_store_commit).
#pragma once

#include <cstdint>

#include "mbarrier.cuh"
#include "shared_address.cuh"

namespace tessera::cuda::arch {

__device__ __forceinline__ void bulk_load(void* smem_dst, void const* gmem_src, uint32_t bytes,
                                          Mbarrier* smem_full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(smem_dst)),
      "l"(gmem_src), "r"(bytes), "r"(shared_address(smem_full))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* gmem_dst, void const* smem_src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem_dst),
               "r"(shared_address(smem_src)), "r"(bytes)
               : "memory");
}

// At most `kPending` of this thread's store groups, those of tma_store() too, are still to be written. Only then may
// their data be announced to others; tma_store_wait_read frees the shared memory and no more.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::cuda::arch
