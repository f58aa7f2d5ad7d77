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

// The same, and 4 bytes, where `wanted` is true: a predicate rather than a branch.
__device__ __forceinline__ void store_streaming_16(void* gmem_dst, uint4 bits, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(gmem_dst),
      "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_streaming_8(void* gmem_dst, uint2 bits, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "@p st.global.cs.v2.u32 [%0], {%1, %2};\n"
      "}" ::"l"(gmem_dst),
      "r"(bits.x), "r"(bits.y), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_4(void* gmem_dst, float value, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.global.f32 [%0], %1;\n"
      "}" ::"l"(gmem_dst),
      "f"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

}  // namespace tessera::cuda::arch
