// SPDX-License-Identifier: Apache-2.0
// Loads in the order of the program: runs of them are issued back to back before the first value is used, and none
// moves ahead of the run before it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

// 16 bytes that are read once, first to leave the caches. Zeros, and no access, where `wanted` is false: a predicate
// rather than a branch.
__device__ __forceinline__ uint4 load_streaming_16(void const* gmem_src, bool wanted) {
  uint4 bits;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
      : "l"(gmem_src), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return bits;
}

// A bf16 that others read, too.
__device__ __forceinline__ float load_bf16(void const* gmem_src, bool wanted) {
  uint32_t bits;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b16 h;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.b16 h, 0;\n"
      "@p ld.global.b16 h, [%1];\n"
      "mov.b32 %0, {0, h};\n"
      "}"
      : "=r"(bits)
      : "l"(gmem_src), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return __uint_as_float(bits);
}

// 4 bytes that others read, too.
__device__ __forceinline__ uint32_t load_4(void const* gmem_src, bool wanted) {
  uint32_t bits;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.u32 %0, 0;\n"
      "@p ld.global.u32 %0, [%1];\n"
      "}"
      : "=r"(bits)
      : "l"(gmem_src), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return bits;
}

// Asks for the line of 128 bytes to be in L2 when it is loaded.
__device__ __forceinline__ void prefetch_l2(void const* gmem_src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem_src));
}

}  // namespace tessera::cuda::arch
