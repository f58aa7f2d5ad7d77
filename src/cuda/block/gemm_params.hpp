// SPDX-License-Identifier: Apache-2.0
// What a GEMM kernel is told at launch, besides its epilogue's part.
#pragma once

#include <cuda.h>

namespace tessera::cuda::block {

struct GemmParams {
  CUtensorMap a;            // (k, row), box 64 x 64; kTma only
  CUtensorMap b;            // (k, row, half, segment), box 64 x b_box_n x b_box_halves x 1
  void const* gmem_a;       // kGather only, as are the next two
  int a_pitch_chunks;       // row pitch of gmem_a in 16-byte units
  int const* gmem_index;    // row -> row of gmem_a
  int const* gmem_offsets;  // [segments + 1]
  int* gmem_tile_counter;   // 0 before and after every launch
  int segments;
  int n_tiles;
  int k_tiles;
};

}  // namespace tessera::cuda::block
