// SPDX-License-Identifier: Apache-2.0
// TMA loads in a pair of CTAs: data land in this CTA, or in both, and their bytes are reported to a barrier of CTA 0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../mbarrier.cuh"

namespace tessera::cuda::arch {

// The address of the same object in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t shared_address_in(void const* smem, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(smem)), "r"(rank));
  return remote;
}

__device__ __forceinline__ void tma_load_for_pair(void* smem_dst, CUtensorMap const* map,
                                                  Mbarrier* smem_full, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load_for_pair(void* smem_dst, CUtensorMap const* map,
                                                  Mbarrier* smem_full, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load_for_pair(void* smem_dst, CUtensorMap const* map,
                                                  Mbarrier* smem_full, int c0, int c1, int c2,
                                                  int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_for_pair(void* smem_dst, CUtensorMap const* map,
                                                  Mbarrier* smem_full, int c0, int c1, int c2,
                                                  int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// To the same place in both CTAs.
__device__ __forceinline__ void tma_load_to_pair(void* smem_dst, CUtensorMap const* map,
                                                 Mbarrier* smem_full, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.cta_group::2 [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(
          shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "h"(static_cast<uint16_t>(3)), "r"(c0),
      "r"(c1)
      : "memory");
}

// Four rows of a matrix, named one by one, from column c0 on.
__device__ __forceinline__ void tma_gather_for_pair(void* smem_dst, CUtensorMap const* map,
                                                    Mbarrier* smem_full, int c0, int row0, int row1,
                                                    int row2, int row3) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
      ".cta_group::2 [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(smem_dst)),
      "l"(map), "r"(shared_address_in(smem_full, 0)), "r"(c0), "r"(row0), "r"(row1), "r"(row2),
      "r"(row3)
      : "memory");
}

}  // namespace tessera::cuda::arch
