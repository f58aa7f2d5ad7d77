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

// accumulate = 0 overwrites d. Columns come in groups of 128, 64 registers each.
__device__ __forceinline__ void wgmma_e4m3_m64n128k32(float (&d0)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      TESSERA_64_OPERANDS
      "}, %64, %65, p, 1, 1;\n}"
      : TESSERA_GROUP(d0)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_e4m3_m64n256k32(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {"
      TESSERA_128_OPERANDS
      "}, %128, %129, p, 1, 1;\n}"
      : TESSERA_GROUP(d0), TESSERA_GROUP(d1)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef TESSERA_128_OPERANDS
#undef TESSERA_64_OPERANDS
#undef TESSERA_GROUP
// clang-format on

}  // namespace tessera::cuda::arch
