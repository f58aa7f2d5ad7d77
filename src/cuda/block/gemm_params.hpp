// SPDX-License-Identifier: Apache-2.0
// What a GEMM kernel is told at launch, besides its epilogue's part.
#pragma once

#include <cuda.h>

namespace tessera::cuda::block {

struct GemmParams {
  CUtensorMap a;            // (k, row), box 64 x tile_m; kTma only
  CUtensorMap b;            // make_tile_map(): a CTA's share of a B tile in one box
  CUtensorMap b_half[2];    // make_weight_map(), boxes of 64 k x 64 rows; only if b_in_boxes
  bool b_in_boxes;          // B's layout needs a load for every half and row group
  int b_block;              // rows of a block of B: make_weight_map()
  void const* gmem_a;       // kGather only, as are the next three
  int a_pitch_chunks;       // row pitch of gmem_a in 16-byte units
  int a_row_bytes;          // gemm_k * 2
  int const* gmem_index;    // row -> row of gmem_a
  int const* gmem_offsets;  // [segments + 1]; null: one segment of a_rows rows
  int a_rows;
  int* gmem_tile_counter;  // 0 before and after every launch
  int segments;
  int n_tiles;
  int k_tiles;
};

}  // namespace tessera::cuda::block
