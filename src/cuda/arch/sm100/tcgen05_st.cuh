// SPDX-License-Identifier: Apache-2.0
// tcgen05.st: from registers to tensor memory, by a converged warp; addresses as for tcgen05_ld.cuh. What follows in
// other threads, or by mma, needs tcgen05_wait_st() before the fence.
#pragma once

#include <cstdint>

#include "tcgen05_registers.cuh"

namespace tessera::cuda::arch {

// A thread has a lane: column i gets register i.
__device__ __forceinline__ void tcgen05_st_rows(uint32_t tensor, uint32_t const (&r)[32]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], " TESSERA_TENSOR_32_OPERANDS
               ";" ::TESSERA_TENSOR_32("r", r),
               "r"(tensor)
               : "memory");
}

__device__ __forceinline__ void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

}  // namespace tessera::cuda::arch
