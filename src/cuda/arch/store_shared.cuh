// SPDX-License-Identifier: Apache-2.0
// Stores to shared memory by 32-bit address, in the order of the program.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ void store_shared_4(uint32_t smem_dst, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_dst), "f"(value) : "memory");
}

// The same where `wanted` is true: a predicate rather than a branch.
__device__ __forceinline__ void store_shared_4(uint32_t smem_dst, float value, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.shared.f32 [%0], %1;\n"
      "}" ::"r"(smem_dst),
      "f"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t smem_dst, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_dst), "f"(first), "f"(second)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t smem_dst, uint2 bits) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem_dst), "r"(bits.x), "r"(bits.y)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t smem_dst, uint4 bits) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem_dst), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w)
               : "memory");
}

}  // namespace tessera::cuda::arch
