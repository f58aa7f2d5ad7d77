// SPDX-License-Identifier: Apache-2.0
// Arguments of a GEMM kernel's launch, besides its epilogue's part.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::cuda::gemm {

struct GemmParams {
  // (k, row), box 64 x tile_m; k_halves = 2: (k, half, row); varlen-K: (row of D, k), box 64 x 64. kTma only.
  CUtensorMap a;
  // make_tile_map(): a CTA's share of a B tile in one box; [1]: of the second k half.
  // varlen-K: [0], make_ragged_tile_load_map().
  CUtensorMap b[2];
  // make_weight_map(), boxes of 64 k x 64 rows; only if b_in_boxes or partial_last.
  // varlen-K: [0], make_ragged_load_map().
  CUtensorMap b_half[2];
  CUtensorMap v;       // adds_outer_product: (column, row), box 64 x 8
  int v_rows;          // of each segment; more than one: v is the sum of the first two
  int b_groups;        // row groups that exist of a tile, short_b, or of the last one, partial_last
  bool b_in_boxes;     // B's layout needs a load for every half and row group
  int b_block;         // rows of a block of B: make_weight_map()
  int ragged_extent;   // varlen-K: of B's maps
  int b_half_groups;   // varlen-K: row groups in a half of B
  void const* gmem_a;  // kGather only, as are the next three
  int a_pitch_chunks;  // row pitch of gmem_a in 16-byte units
  int a_row_bytes;     // bytes of a row that exist
  int const* gmem_index;    // row -> row of gmem_a; null: the row itself
  int const* gmem_offsets;  // [segments + 1]; null: segments of segment_rows rows
  int segment_rows;
  int total_rows;
  int* gmem_tile_counter;   // draws_tiles: 0 before and after every launch
  uint32_t* gmem_handover;  // hands_over, takes_over: the word between the two kernels, or null
  int handover_segments;    // the first ones, handed over before the kernel's end
  // ready_first: what await_rows.cuh says of rows that another kernel still brings; nulls: all are there
  int const* gmem_ready_blocks;   // [segments]: how many of the first blocks are ready at launch
  uint32_t const* gmem_arrivals;  // all rows are there when this word is
  uint32_t arrivals;              // this number
  int segments;
  int m_tiles;  // varlen-K: of each D
  int n_tiles;
  int k_tiles;              // varlen-M
  int k_half_tiles;         // k_halves = 2: k_tiles of the first half
  int k_tiles_before_next;  // varlen-K, takes_over: LetsNextStart; 0: the next kernel may start at once
};

}  // namespace tessera::cuda::gemm
