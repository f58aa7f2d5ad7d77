// SPDX-License-Identifier: Apache-2.0
// wgmma on e4m3: D(64 x N, fp32 registers) += A(64 x 32) * B(N x 32)^T, both operands K-major in shared memory; the
// hardware has no other order for 8-bit types. Rows are 128 bytes, 128 codes, so descriptors, swizzle and the step of
// 32 bytes from one multiplication to the next are those of bf16 (wgmma.cuh), and so is the fragment of D.
//
// The accumulator keeps 13 fraction bits of each sum, relative to the largest summand: partial sums of more than 128
// products have to be added up in fp32 registers.
#pragma once

#include <cstdint>

#include "wgmma.cuh"

namespace tessera::cuda::arch {

// clang-format off
// 32 registers of a group of columns, from d[i] on, and the operands that they are.
#define TESSERA_REGISTERS(d, i) \
  "+f"((d)[(i) + 0]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7]), \
  "+f"((d)[(i) + 8]), "+f"((d)[(i) + 9]), "+f"((d)[(i) + 10]), "+f"((d)[(i) + 11]), "+f"((d)[(i) + 12]), "+f"((d)[(i) + 13]), "+f"((d)[(i) + 14]), "+f"((d)[(i) + 15]), \
  "+f"((d)[(i) + 16]), "+f"((d)[(i) + 17]), "+f"((d)[(i) + 18]), "+f"((d)[(i) + 19]), "+f"((d)[(i) + 20]), "+f"((d)[(i) + 21]), "+f"((d)[(i) + 22]), "+f"((d)[(i) + 23]), \
  "+f"((d)[(i) + 24]), "+f"((d)[(i) + 25]), "+f"((d)[(i) + 26]), "+f"((d)[(i) + 27]), "+f"((d)[(i) + 28]), "+f"((d)[(i) + 29]), "+f"((d)[(i) + 30]), "+f"((d)[(i) + 31])
#define TESSERA_32_OPERANDS \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TESSERA_64_OPERANDS \
  TESSERA_32_OPERANDS "," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TESSERA_96_OPERANDS \
  TESSERA_64_OPERANDS "," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TESSERA_128_OPERANDS \
  TESSERA_96_OPERANDS "," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// accumulate = 0 overwrites d. Columns come in groups of 128, 64 registers each.
__device__ __forceinline__ void wgmma_e4m3_m64n64k32(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      TESSERA_32_OPERANDS
      "}, %32, %33, p, 1, 1;\n}"
      : TESSERA_REGISTERS(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_e4m3_m64n128k32(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      TESSERA_64_OPERANDS
      "}, %64, %65, p, 1, 1;\n}"
      : TESSERA_REGISTERS(d, 0), TESSERA_REGISTERS(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_e4m3_m64n192k32(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {"
      TESSERA_96_OPERANDS
      "}, %96, %97, p, 1, 1;\n}"
      : TESSERA_REGISTERS(d, 0), TESSERA_REGISTERS(d, 32), TESSERA_REGISTERS(d, 64)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_e4m3_m64n256k32(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
      TESSERA_128_OPERANDS
      "}, %128, %129, p, 1, 1;\n}"
      : TESSERA_REGISTERS(d0, 0), TESSERA_REGISTERS(d0, 32), TESSERA_REGISTERS(d1, 0), TESSERA_REGISTERS(d1, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef TESSERA_128_OPERANDS
#undef TESSERA_96_OPERANDS
#undef TESSERA_64_OPERANDS
#undef TESSERA_32_OPERANDS
#undef TESSERA_REGISTERS
// clang-format on

}  // namespace tessera::cuda::arch
