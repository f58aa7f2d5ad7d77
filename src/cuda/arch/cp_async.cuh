// SPDX-License-Identifier: Apache-2.0
// cp.async: each thread copies 16 bytes, or 4 or 8, from any global address to shared memory; completion can
// arrive on an mbarrier. The writes belong to the generic proxy: see proxy_fence.cuh.
#pragma once

#include <cstdint>

#include "mbarrier.cuh"
#include "shared_address.cuh"

namespace tessera::cuda::arch {

// Copies the first `bytes` of 16 and zeroes the rest; with 0 the source is not read. Brings the
// enclosing 256 bytes into L2: of a row that is read in 128-byte k_tiles, the next one too.
__device__ __forceinline__ void cp_async_16(uint32_t smem_dst, void const* gmem_src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(smem_dst),
               "l"(gmem_src), "r"(bytes)
               : "memory");
}

// All 16 bytes, with an eviction priority in L2 (tma.cuh).
__device__ __forceinline__ void cp_async_16_with_policy(uint32_t smem_dst, void const* gmem_src,
                                                        uint64_t l2_policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(smem_dst),
      "l"(gmem_src), "l"(l2_policy)
      : "memory");
}

// 4 or 8 bytes, aligned to as many, for what lies beside the rows of a tile.
__device__ __forceinline__ void cp_async_4(uint32_t smem_dst, void const* gmem_src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_dst), "l"(gmem_src)
               : "memory");
}
__device__ __forceinline__ void cp_async_8(uint32_t smem_dst, void const* gmem_src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem_dst), "l"(gmem_src)
               : "memory");
}

// Arrives once all earlier cp.async of this thread have landed. noinc: the arrival is one of those
// the barrier was initialised with.
__device__ __forceinline__ void cp_async_arrive(Mbarrier* smem_barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(smem_barrier))
      : "memory");
}

// The same by groups of this thread: those that it has committed, but for the latest kPending, have landed.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::cuda::arch
