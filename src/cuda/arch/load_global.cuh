// SPDX-License-Identifier: Apache-2.0
// ld.global.cs: 16 bytes that are read once, first to leave the caches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

// Zeros, and no access, where `wanted` is false. A predicate rather than a branch, and volatile: a
// run of these loads is issued back to back before the first value is used.
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

}  // namespace tessera::cuda::arch
