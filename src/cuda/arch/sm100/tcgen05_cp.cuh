// SPDX-License-Identifier: Apache-2.0
// tcgen05.cp: an atom of scales from shared to tensor memory, by one thread; asynchronous, ahead of later mma of the
// thread. An atom is 128 rows of four bytes, 512 bytes in all: byte (m % 32) * 16 + m / 32 * 4 + block. It goes to
// four columns: the cell (lane m % 32 + 32 p, column m / 32) has the four bytes of row m, for p = 0 .. 3.
#pragma once

#include <cstdint>

#include "tcgen05_descriptor.hpp"

namespace tessera::cuda::arch {

// kCtas = 2: in both CTAs, each from its own shared memory.
template <int kCtas>
__device__ __forceinline__ void tcgen05_cp_scales(uint32_t tensor, uint64_t atom) {
  static_assert(kCtas == 1 || kCtas == 2);
  if constexpr (kCtas == 1) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tensor), "l"(atom)
                 : "memory");
  } else {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(tensor), "l"(atom)
                 : "memory");
  }
}

}  // namespace tessera::cuda::arch
