// SPDX-License-Identifier: Apache-2.0
// stmatrix, ldmatrix: a warp stores or loads four 8x8 matrices of 16-bit values held in the fragment
// order of the tensor cores. Lane l gives the address of row l % 8 of matrix l / 8.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ void stmatrix_x4(uint32_t smem_row, uint32_t m0, uint32_t m1,
                                            uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_row),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

// Row r of a stored matrix is its column r.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t smem_row, uint32_t m0, uint32_t m1,
                                                       uint32_t m2, uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_row),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t smem_row, uint32_t& m0, uint32_t& m1,
                                            uint32_t& m2, uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(smem_row)
               : "memory");
}

// Loads what stmatrix_x4_transposed() stored.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t smem_row, uint32_t& m0,
                                                       uint32_t& m1, uint32_t& m2, uint32_t& m3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
               : "r"(smem_row)
               : "memory");
}

}  // namespace tessera::cuda::arch
