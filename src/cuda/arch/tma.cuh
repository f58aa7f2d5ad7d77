// SPDX-License-Identifier: Apache-2.0
// TMA: one thread moves a box of a tensor between global and shared memory. Loads report their
// bytes to an mbarrier; stores are tracked in groups of the issuing thread.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mbarrier.cuh"
#include "shared_address.cuh"

namespace tessera::cuda::arch {

__device__ __forceinline__ void tma_prefetch_map(CUtensorMap const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// L2 eviction priority, as the policy operand of a copy.
__device__ __forceinline__ uint64_t l2_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t l2_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void tma_load(void* smem_dst, CUtensorMap const* map,
                                         Mbarrier* smem_full, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* smem_dst, CUtensorMap const* map,
                                         Mbarrier* smem_full, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* smem_dst, CUtensorMap const* map,
                                         Mbarrier* smem_full, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* smem_dst, CUtensorMap const* map,
                                         Mbarrier* smem_full, int c0, int c1, int c2, int c3,
                                         int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Lands at the same offset, and reports to the same barrier, in every CTA of `cta_mask`.
__device__ __forceinline__ void tma_load_multicast(void* smem_dst, CUtensorMap const* map,
                                                   Mbarrier* smem_full, uint16_t cta_mask, int c0,
                                                   int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(void* smem_dst, CUtensorMap const* map,
                                                   Mbarrier* smem_full, uint16_t cta_mask, int c0,
                                                   int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(
          shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "r"(c4)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(void* smem_dst, CUtensorMap const* map,
                                                   Mbarrier* smem_full, uint16_t cta_mask, int c0,
                                                   int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address(smem_full)), "h"(cta_mask), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_store(CUtensorMap const* map, void const* smem_src, int c0,
                                          int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(smem_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store(CUtensorMap const* map, void const* smem_src, int c0,
                                          int c1, int c2, int c3, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(map),
      "r"(shared_address(smem_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(l2_policy)
      : "memory");
}

// Adds to global memory, element by element; in the type of the map.
__device__ __forceinline__ void tma_reduce_add(CUtensorMap const* map, void const* smem_src, int c0,
                                               int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(smem_src)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most `kPending` of this thread's store groups still have to read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::cuda::arch
