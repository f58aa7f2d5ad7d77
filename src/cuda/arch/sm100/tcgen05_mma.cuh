// SPDX-License-Identifier: Apache-2.0
// tcgen05.mma: D in tensor memory = or += A * B^T, both in shared memory (tcgen05_descriptor.hpp). One thread issues
// it, for its CTA or, kCtas = 2, for a pair: then CTA 0 issues, and each CTA holds half of the rows of A, of B and of
// D, at the same addresses. Asynchronous: commit (tcgen05_commit.cuh) reports when it is done. Multiplications of one
// thread with the same shape and D follow each other without a wait.
// Issue under elect_one(): under another test of one lane the compiler makes a loop over lanes of it.
#pragma once

#include <cstdint>

#include "tcgen05_descriptor.hpp"

namespace tessera::cuda::arch {

// K = 16. instruction: Bf16Mma. accumulate = 0 overwrites D.
template <int kCtas>
__device__ __forceinline__ void tcgen05_mma_bf16(uint32_t tensor_d, uint64_t a, uint64_t b,
                                                 uint32_t instruction, uint32_t accumulate) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(tensor_d),
        "l"(a), "l"(b), "r"(instruction), "r"(accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(tensor_d),
        "l"(a), "l"(b), "r"(instruction), "r"(accumulate)
        : "memory");
  }
}

// K = 32. instruction: Mxf8Mma. tensor_a_scales, tensor_b_scales: the first columns of the scales of A's rows (4
// columns for 128) and of B's, of all of them in both CTAs of a pair.
template <int kCtas>
__device__ __forceinline__ void tcgen05_mma_mxf8(uint32_t tensor_d, uint64_t a, uint64_t b,
                                                 uint32_t instruction, uint32_t tensor_a_scales,
                                                 uint32_t tensor_b_scales, uint32_t accumulate) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], "
        "p;\n}" ::"r"(tensor_d),
        "l"(a), "l"(b), "r"(instruction), "r"(tensor_a_scales), "r"(tensor_b_scales),
        "r"(accumulate)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], "
        "p;\n}" ::"r"(tensor_d),
        "l"(a), "l"(b), "r"(instruction), "r"(tensor_a_scales), "r"(tensor_b_scales),
        "r"(accumulate)
        : "memory");
  }
}

}  // namespace tessera::cuda::arch
