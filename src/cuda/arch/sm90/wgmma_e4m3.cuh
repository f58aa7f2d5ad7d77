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
#include "wgmma_operands.cuh"

namespace tessera::cuda::arch {

// clang-format off
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

// clang-format on

}  // namespace tessera::cuda::arch
