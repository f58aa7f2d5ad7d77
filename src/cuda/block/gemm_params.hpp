// SPDX-License-Identifier: Apache-2.0
// What a GEMM kernel is told at launch, besides its epilogue's part.
#pragma once

#include <cuda.h>

namespace tessera::cuda::block {

struct GemmParams {
  CUtensorMap a;           // (k, row), box 64 x 64, for kGatherTma 64 x 1
  CUtensorMap b;           // (k, row, half, segment), box 64 x b_box_n x b_box_halves x 1
  void const* gmem_a;      // kGatherCpAsync
  int a_pitch_chunks;      // kGatherCpAsync: row pitch of gmem_a in 16-byte units
  int const* gmem_index;   // gathers: row -> row of A
  int const* gmem_offsets; // [segments + 1]
  int* gmem_tile_counter;  // 0 before and after every launch
  int segments;
  int n_tiles;
  int k_tiles;
};

}  // namespace tessera::cuda::block
