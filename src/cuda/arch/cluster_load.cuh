// SPDX-License-Identifier: Apache-2.0
// Clusters of CTAs: loads from a peer's shared memory.
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace tessera::cuda::arch {

// 16 bytes of CTA `rank`, from where `smem_source` lies in this one.
__device__ __forceinline__ int4 load_from_cta(void const* smem_source, uint32_t rank) {
  int4 value;
  asm volatile(
      "{\n"
      ".reg .b32 source;\n"
      "mapa.shared::cluster.u32 source, %4, %5;\n"
      "ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [source];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(shared_address(smem_source)), "r"(rank)
      : "memory");
  return value;
}

}  // namespace tessera::cuda::arch
