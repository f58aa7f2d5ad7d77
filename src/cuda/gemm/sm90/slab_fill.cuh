// SPDX-License-Identifier: Apache-2.0
// Brings a warpgroup's accumulators into slabs in shared memory, and values of slabs to them: through stmatrix and
// ldmatrix, pair i of a thread as pair i of its slab.
#pragma once

#include "../../arch/load_shared.cuh"
#include "../../arch/shared_address.cuh"
#include "../../arch/stmatrix.cuh"
#include "../../arch/store_shared.cuh"
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

  // Finds where this lane's row of the 16x16 values {pair(j, 0), pair(j, 1), pair(j+1, 0), pair(j+1, 1)} of its
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

  // The thread's pairs of a strip of 16 columns.
  __device__ __forceinline__ void load(bf16 const* slab, int strip, uint32_t (&pairs)[4]) const {
    arch::ldmatrix_x4(matrix_row(slab, 2 * strip), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  __device__ __forceinline__ void store(bf16* slab, int strip, uint32_t const (&pairs)[4]) const {
    arch::stmatrix_x4(matrix_row(slab, 2 * strip), pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  // Two slabs, 64 columns each, with two values for every column of a slab of accumulators, as gate and up where these
  // are interleaved: the four values of the i-th pair of a strip.
  __device__ __forceinline__ static uint2 load_doubled(bf16 const* first, bf16 const* second,
                                                       int strip, int i) {
    return arch::load_shared_8(doubled(first, second, strip, i));
  }
  __device__ __forceinline__ static void store_doubled(bf16* first, bf16* second, int strip, int i,
                                                       uint2 values) {
    arch::store_shared_8(doubled(first, second, strip, i), values);
  }

 private:
  __device__ __forceinline__ static uint32_t doubled(bf16 const* first, bf16 const* second,
                                                     int strip, int i) {
    int const lane = arch::lane_idx(), row = lane / 4;
    uint32_t const smem = arch::shared_address(strip < 2 ? first : second) +
                          (arch::warp_in_warpgroup() * kWarpRows + row) * 128 + lane % 2 * 8;
    int const chunk = strip % 2 * 4 + i / 2 * 2 + lane % 4 / 2;
    return smem + i % 2 * (8 * 128) + ((chunk ^ row) << 4);
  }

  int row_offset_;
  int chunk_;
  int swizzle_;
};

// Does the same for slabs that hold the transpose: row i of the slab has the 64 rows' values of column i.
class SlabColumns {
 public:
  template <typename Pair>
  __device__ __forceinline__ void fill(bf16* slab, Pair pair) const {
    uint32_t const smem_row = matrix_row(slab);
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; j += 2) {
      arch::stmatrix_x4_transposed(smem_row + j * 8 * 128, pair(2 * j), pair(2 * j + 1),
                                   pair(2 * j + 2), pair(2 * j + 3));
    }
  }

  __device__ __forceinline__ void load(bf16 const* slab, int strip, uint32_t (&pairs)[4]) const {
    arch::ldmatrix_x4_transposed(matrix_row(slab) + strip * 16 * 128, pairs[0], pairs[1], pairs[2],
                                 pairs[3]);
  }

 private:
  // Returns the place of this lane's row of the warp's first 16 columns.
  __device__ __forceinline__ static uint32_t matrix_row(bf16 const* slab) {
    int const lane = arch::lane_idx();
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const chunk = thread / arch::kWarpThreads * 2 + (lane / 8 & 1);
    return arch::shared_address(slab) + (lane / 16 * 8 + lane % 8) * 128 +
           ((chunk ^ lane % 8) << 4);
  }
};

}  // namespace tessera::cuda::gemm
