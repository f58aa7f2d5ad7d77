// SPDX-License-Identifier: Apache-2.0
// Bits of the lanes of a warp.
#pragma once

#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"

namespace tessera::cuda::warp {

// Returns as bit i of lane t what bit t of lane i was. Halves change places: of 32 by 32 bits, then of each quarter,
// and so on. By a converged warp.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
  TESSERA_UNROLL
  for (int half = arch::kWarpThreads / 2; half > 0; half /= 2) {
    // The bits whose place has no `half` in it.
    uint32_t const low = 0xffffffffu / ((1u << half) + 1);
    uint32_t const other = __shfl_xor_sync(arch::kAllLanes, word, half);
    bool const is_low = (arch::lane_idx() & half) == 0;
    word = is_low ? (word & low) | (other & low) << half : (word & ~low) | (other & ~low) >> half;
  }
  return word;
}

}  // namespace tessera::cuda::warp
