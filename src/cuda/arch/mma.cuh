// SPDX-License-Identifier: Apache-2.0
// mma.sync: a warp multiplies 16 rows of A with 8 rows of B over 16 of k, operands in registers.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

// d += A B^T, bf16. Lane l = 4g + q holds of A the pairs {2q, 2q + 1} of k of rows g (a0) and g + 8 (a1) and the pairs
// {2q + 8, 2q + 9} of both (a2, a3), of B the same two pairs of row g (b0, b1), of D columns 2q and 2q + 1 of row g
// (d[0], d[1]) and of row g + 8 (d[2], d[3]). By a converged warp.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace tessera::cuda::arch
