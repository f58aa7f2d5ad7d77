// SPDX-License-Identifier: Apache-2.0
// Reads a warp's 16 rows of 64 bf16 columns in shared memory, four at a time: in the order in which
// cuda/gemm/sm90/warp_rows.cuh fills them.
#pragma once

#include "cuda/arch/load_shared.cuh"
#include "cuda/arch/warp.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

constexpr int kWarpRowBytes = 128;
constexpr int kLanesOfRow =
    kWarpRowBytes / 16;  // each with a chunk, where a warp reads four rows at once

// A lane adds this to the rows' address for load_warp_rows: its chunk of the first four rows.
__device__ inline std::uint32_t chunk_of_lane() {
  int const row = arch::lane_idx() / kLanesOfRow;
  return row * kWarpRowBytes + ((arch::lane_idx() % kLanesOfRow ^ row) << 4);
}

// Loads this lane's 8 columns of row 4 * fours + lane / kLanesOfRow.
__device__ inline uint4 load_warp_rows(std::uint32_t chunk, int fours) {
  // Rows four further on have the other half of the swizzle.
  return arch::load_shared_16((chunk ^ (fours & 1) << 6) + fours * 4 * kWarpRowBytes);
}

}  // namespace tessera::expert_parallel
