// SPDX-License-Identifier: Apache-2.0
// A warp's 16 rows of 64 bf16 columns in shared memory, at a multiple of 1024 bytes: 128 bytes a row, swizzled, so
// chunk c, of 16 bytes, of row r lies in place c ^ r % 8. gemm::SlabRows does it with three registers of a lane, this
// with one.
#pragma once

#include "cuda/arch/load_shared.cuh"
#include "cuda/arch/stmatrix.cuh"
#include "cuda/arch/warp.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

constexpr int kWarpRowBytes = 128;
constexpr int kLanesOfRow =
    kWarpRowBytes / 16;  // each with a chunk, where a warp reads four rows at once

// What this lane adds to the rows' address for fill_warp_rows. Matrix lane/8 of an x4: bit 0 selects the lower 8 rows,
// bit 1 the right 8 columns.
__device__ inline std::uint32_t matrix_row_of_lane() {
  int const lane = arch::lane_idx();
  return lane % 16 * kWarpRowBytes + ((lane / 16 ^ lane % 8) << 4);
}

// packed(j, lower): this thread's two values of columns 8j + 2(lane%4) + {0,1}, of row lane/4, or of row lane/4 + 8
// if `lower`.
template <class Packed>
__device__ void fill_warp_rows(std::uint32_t matrix_row, Packed packed) {
  matrix_row = arch::forgotten(matrix_row);
  TESSERA_UNROLL
  for (int j = 0; j < kWarpRowBytes / 16; j += 2) {
    arch::stmatrix_x4(matrix_row ^ j << 4, packed(j, 0), packed(j, 1), packed(j + 1, 0),
                      packed(j + 1, 1));
  }
}

// What this lane adds to the rows' address for load_warp_rows: its chunk of the first four rows.
__device__ inline std::uint32_t chunk_of_lane() {
  int const row = arch::lane_idx() / kLanesOfRow;
  return row * kWarpRowBytes + ((arch::lane_idx() % kLanesOfRow ^ row) << 4);
}

// This lane's 8 columns of row 4 * fours + lane / kLanesOfRow.
__device__ inline uint4 load_warp_rows(std::uint32_t chunk, int fours) {
  // Rows four further on have the other half of the swizzle.
  return arch::load_shared_16((chunk ^ (fours & 1) << 6) + fours * 4 * kWarpRowBytes);
}

}  // namespace tessera::expert_parallel
