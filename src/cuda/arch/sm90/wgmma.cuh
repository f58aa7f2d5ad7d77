// SPDX-License-Identifier: Apache-2.0
// wgmma: D(64 x N, fp32 registers) += A(64 x 16) * B(N x 16)^T, bf16 operands in shared memory,
// issued by a warpgroup and executed asynchronously.
//
// Fragment of D: lane l of warp w holds rows 16w + l/4 (+8) and columns 8j + 2(l%4) + {0,1} in
// d[4j + 2*(row half) + column bit].
#pragma once

#include <cstdint>

#include "../shared_address.cuh"
#include "wgmma_operands.cuh"

namespace tessera::cuda::arch {

// Operand in K-major order with the 128-byte swizzle: rows of 64 bf16, groups of 8 rows 1024 bytes
// apart. The buffer is 1024-byte aligned; the next k16 lies 32 bytes further inside the same atom.
//   bits 0-13 address/16 | 16-29 leading stride/16 (unused here) | 32-45 stride of 8 rows/16 | 62-63
//   swizzle, 1 = 128 bytes
__device__ __forceinline__ uint64_t wgmma_descriptor_k_major(uint32_t smem) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kLeadingStride = uint64_t{1} << 16;
  return kSwizzle128 | kGroupStride | kLeadingStride | ((smem & 0x3ffff) >> 4);
}
__device__ __forceinline__ uint64_t wgmma_descriptor_k_major(void const* smem) {
  return wgmma_descriptor_k_major(shared_address(smem));
}

constexpr uint64_t kWgmmaDescriptorK16 = 32 / 16;

// Operand in row-major order (contiguous along its 64 x N rows dimension) with the 128-byte swizzle:
// boxes of 64 k x 64 rows, 8 KB apart; in a box k runs in groups of 8, 1024 bytes apart. The next k16
// lies two groups further. Other distances by template.
template <int kGroupBytes = 1024, int kBoxBytes = 8192>
__device__ __forceinline__ uint64_t wgmma_descriptor_rows_major(void const* smem) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{kGroupBytes / 16} << 32;
  constexpr uint64_t kLeadingStride = uint64_t{kBoxBytes / 16} << 16;
  return kSwizzle128 | kGroupStride | kLeadingStride | ((shared_address(smem) & 0x3ffff) >> 4);
}

constexpr uint64_t kWgmmaRowsMajorK16 = 2048 / 16;

// Orders earlier register and shared-memory accesses of the warpgroup before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns once at most kPending groups of this warpgroup are in flight. Groups belong to the
// warpgroup, so any one of its threads may then speak for all four warps.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
// accumulate = 0 overwrites d. Columns come in groups of 128, 64 registers each. kTranspose: the operand
// is rows-major.
template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d0)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      TESSERA_64_OPERANDS
      "}, %64, %65, p, 1, 1, %67, %68;\n}"
      : TESSERA_REGISTERS(d0, 0), TESSERA_REGISTERS(d0, 32)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      TESSERA_128_OPERANDS
      "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : TESSERA_REGISTERS(d0, 0), TESSERA_REGISTERS(d0, 32), TESSERA_REGISTERS(d1, 0), TESSERA_REGISTERS(d1, 32)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
}

// A in registers: of row lane/4 (a[0], a[2]) and lane/4 + 8 (a[1], a[3]) k = 2*(lane%4) + {0,1}, in a[2], a[3] 8 more. B is
// rows-major. Adds to D.
__device__ __forceinline__ void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint32_t const (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      TESSERA_128_OPERANDS
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : TESSERA_REGISTERS(d0, 0), TESSERA_REGISTERS(d0, 32), TESSERA_REGISTERS(d1, 0), TESSERA_REGISTERS(d1, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// clang-format on

}  // namespace tessera::cuda::arch
