// SPDX-License-Identifier: Apache-2.0
// A weight gradient's epilogues learn here where its elements lie, for addresses and for TMA.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../gemm/storage.cuh"

namespace tessera::cuda::gemm {

// A half of dW in memory; element (i, c) of a segment lies i / block blocks, i % block rows and c columns further.
struct WgradHalf {
  CUtensorMap map;  // make_weight_map(), i its rows, c its columns; unless bf16 is deferred
  bf16* gmem;       // bf16 deferred, or read because it is added to
  int64_t segment_stride, row_stride, column_stride, block_stride;
  int block;
  bool exists;  // false: nobody wants it
};

// bf16 deferred: inside a column group of either half, in bytes. Blocks of fewer than 64 i have 2^block_shift, so the
// steps of i's bits add up.
struct WgradSteps {
  static constexpr int kSecondRow = 4, kPieceRows = 32;  // of HeldColumns

  int64_t row, column, block;
  int block_shift;                   // at most 6
  int64_t second_row, second_piece;  // K-major: to the lane's second i, to the second piece
};

struct WgradStoreParams {
  WgradHalf halves[2];
  WgradSteps steps;
  int num_halves;
  int half_groups;    // column groups in a half
  int rows, columns;  // n, d
  bool accumulates;
};

// Column group `group` of dW: where it is in which half, and whether anybody wants it.
struct WgradGroup {
  int half, i;
  bool exists;
};
__device__ __forceinline__ WgradGroup wgrad_group(WgradStoreParams const& p, int group) {
  int const half = group >= p.half_groups ? 1 : 0;
  bool const exists = group < p.num_halves * p.half_groups && p.halves[half].exists;
  return {half, (group - half * p.half_groups) * kSlabColumns, exists};
}

// TMA's coordinates of 64 c from `row`, the column group's i and what follows. The segment comes last.
struct WgradCoordinates {
  int c0, c1, c2;
};
template <Major kMajor>
__device__ __forceinline__ WgradCoordinates wgrad_coordinates(WgradHalf const& dw, int i, int row) {
  if constexpr (kMajor == Major::kRows) return {i, row, 0};
  if (i < dw.block) return {row, i, 0};
  return {row, i % dw.block, i / dw.block};
}

}  // namespace tessera::cuda::gemm
