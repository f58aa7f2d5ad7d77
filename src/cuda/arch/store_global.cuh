// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

// 16 bytes that nobody reads soon: first to leave the caches.
__device__ __forceinline__ void store_streaming_16(void* gmem_dst, uint4 bits) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem_dst), "r"(bits.x),
               "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}

__device__ __forceinline__ void store_streaming_8(void* gmem_dst, uint2 bits) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(gmem_dst), "r"(bits.x), "r"(bits.y)
               : "memory");
}

}  // namespace tessera::cuda::arch
