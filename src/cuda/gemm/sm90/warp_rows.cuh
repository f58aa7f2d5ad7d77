// SPDX-License-Identifier: Apache-2.0
// Brings a warp's 16 rows of a slab into shared memory, at a multiple of 1024 bytes: 128 bytes a row, swizzled, so
// chunk c, of 16 bytes, of row r lies in place c ^ r % 8. SlabRows does it with three registers of a lane, this with
// one.
#pragma once

#include "../../arch/stmatrix.cuh"
#include "../../arch/warp.cuh"
#include "../config.hpp"

namespace tessera::cuda::gemm {

// A lane adds this to the rows' address for fill_warp_rows. Matrix lane/8 of an x4: bit 0 selects the lower 8 rows, bit
// 1 the right 8 columns.
__device__ __forceinline__ uint32_t warp_matrix_row() {
  int const lane = arch::lane_idx();
  return lane % 16 * (kSlabColumns * 2) + ((lane / 16 ^ lane % 8) << 4);
}

// pair(i): this thread's pair i of the slab (accumulators.cuh), packed.
template <class Pair>
__device__ __forceinline__ void fill_warp_rows(uint32_t matrix_row, Pair pair) {
  matrix_row = arch::forgotten(matrix_row);
  TESSERA_UNROLL
  for (int j = 0; j < kSlabColumns / 8; j += 2) {
    arch::stmatrix_x4(matrix_row ^ j << 4, pair(2 * j), pair(2 * j + 1), pair(2 * j + 2),
                      pair(2 * j + 3));
  }
}

}  // namespace tessera::cuda::gemm
