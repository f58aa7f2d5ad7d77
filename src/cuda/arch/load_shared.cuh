// SPDX-License-Identifier: Apache-2.0
// Loads from shared memory by 32-bit address, in the order of the program.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ uint4 load_shared_16(uint32_t smem_src) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(smem_src)
               : "memory");
  return bits;
}

__device__ __forceinline__ float load_shared_4(uint32_t smem_src) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem_src) : "memory");
  return value;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t smem_src) {
  uint2 bits;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "r"(smem_src)
               : "memory");
  return bits;
}

}  // namespace tessera::cuda::arch
