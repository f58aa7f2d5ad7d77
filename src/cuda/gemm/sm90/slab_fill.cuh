// SPDX-License-Identifier: Apache-2.0
// How a warpgroup's accumulators come into slabs in shared memory, through stmatrix.
#pragma once

#include "../../arch/shared_address.cuh"
#include "../../arch/stmatrix.cuh"
#include "../../arch/warp.cuh"
#include "../storage.cuh"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

// This thread's place in a slab, as stmatrix and ldmatrix take it.
class SlabRows {
 public:
  __device__ __forceinline__ SlabRows() {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const lane = thread % arch::kWarpThreads;
    // Matrix lane/8 of an x4: bit 0 selects the lower 8 rows, bit 1 the right 8 columns.
    int const row = thread / arch::kWarpThreads * 16 + (lane / 8 & 1) * 8 + lane % 8;
    row_offset_ = row * 128;
    chunk_ = lane / 16;
    swizzle_ = row & 7;
  }

  // Where this lane's row of the 16x16 values {pair(j, 0), pair(j, 1), pair(j+1, 0), pair(j+1, 1)} of its
  // warp lies.
  __device__ __forceinline__ uint32_t matrix_row(bf16 const* slab, int j) const {
    return arch::shared_address(slab) + row_offset_ + (((j + chunk_) ^ swizzle_) << 4);
  }

  // pair(i): this thread's pair i of the slab (accumulators.cuh), packed.
  template <typename Pair>
  __device__ __forceinline__ void fill(bf16* slab, Pair pair) const {
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; j += 2) {
      arch::stmatrix_x4(matrix_row(slab, j), pair(2 * j), pair(2 * j + 1), pair(2 * j + 2),
                        pair(2 * j + 3));
    }
  }

 private:
  int row_offset_;
  int chunk_;
  int swizzle_;
};

}  // namespace tessera::cuda::gemm
