// SPDX-License-Identifier: Apache-2.0
// wgmma: D(64 x N, fp32 registers) += A(64 x 16) * B(N x 16)^T, bf16 operands in shared memory,
// issued by a warpgroup and executed asynchronously.
//
// Fragment of D: lane l of warp w holds rows 16w + l/4 (+8) and columns 8j + 2(l%4) + {0,1} in
// d[4j + 2*(row half) + column bit].
#pragma once

#include <cstdint>

#include "shared_address.cuh"

namespace tessera::cuda::arch {

// Operand in K-major order with the 128-byte swizzle: rows of 64 bf16, groups of 8 rows 1024 bytes
// apart. The buffer is 1024-byte aligned; the next k16 lies 32 bytes further inside the same atom.
//   bits 0-13 address/16 | 16-29 leading stride/16 (unused here) | 32-45 stride of 8 rows/16 | 62-63
//   swizzle, 1 = 128 bytes
__device__ __forceinline__ uint64_t wgmma_descriptor_k_major(void const* smem) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kLeadingStride = uint64_t{1} << 16;
  return kSwizzle128 | kGroupStride | kLeadingStride | ((shared_address(smem) & 0x3ffff) >> 4);
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
// The registers of a group of 128 columns, and the first 64 or 128 operands, which they are.
#define TESSERA_GROUP(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TESSERA_64_OPERANDS \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TESSERA_128_OPERANDS \
  TESSERA_64_OPERANDS "," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// accumulate = 0 overwrites d. Columns come in groups of 128, 64 registers each. kTranspose: the operand
// is rows-major.
template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d0)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      TESSERA_64_OPERANDS
      "}, %64, %65, p, 1, 1, %67, %68;\n}"
      : TESSERA_GROUP(d0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      TESSERA_128_OPERANDS
      "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : TESSERA_GROUP(d0), TESSERA_GROUP(d1)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));
}

// A in registers: of row lane/4 (a[0], a[2]) and lane/4 + 8 (a[1], a[3]) k = 2*(lane%4) + {0,1}, in a[2], a[3] 8 more. B is
// rows-major. Adds to D.
__device__ __forceinline__ void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint32_t const (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      TESSERA_128_OPERANDS
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : TESSERA_GROUP(d0), TESSERA_GROUP(d1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef TESSERA_128_OPERANDS
#undef TESSERA_64_OPERANDS
#undef TESSERA_GROUP
// clang-format on

}  // namespace tessera::cuda::arch
