// SPDX-License-Identifier: Apache-2.0
// tcgen05.ld: from tensor memory to registers, by a converged warp, whose lanes give the same address. Warp w reaches
// lanes 32 (w % 4) .. + 31 alone, and all columns. Registers are there behind tcgen05_wait_ld().
#pragma once

#include <cstdint>

#include "tcgen05_registers.cuh"

namespace tessera::cuda::arch {

// A thread has a lane: register i is column i. tensor: tensor_lane(32 (w % 4)) + first column.
__device__ __forceinline__ void tcgen05_ld_rows(uint32_t (&r)[32], uint32_t tensor) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 " TESSERA_TENSOR_32_OPERANDS ", [%32];"
               : TESSERA_TENSOR_32("=r", r)
               : "r"(tensor));
}

// 16 lanes x 64 columns in the order of wgmma's fragments: register 4j + 2h + b of thread l is lane l / 4 + 8h, column
// 8j + 2 (l % 4) + b. tensor: tensor_lane(32 (w % 4)), or 16 more.
__device__ __forceinline__ void tcgen05_ld_fragments(uint32_t (&r)[32], uint32_t tensor) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 " TESSERA_TENSOR_32_OPERANDS ", [%32];"
               : TESSERA_TENSOR_32("=r", r)
               : "r"(tensor));
}

// All loads of this thread have written their registers.
__device__ __forceinline__ void tcgen05_wait_ld() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace tessera::cuda::arch
