// SPDX-License-Identifier: Apache-2.0
// A work tile of a GEMM, as the scheduler announces it (scheduler.cuh) and every role reads it (work_queue.cuh).
#pragma once

#include <cstdint>

namespace tessera::cuda::gemm {

struct WorkTile {
  int segment;
  int n_tile;
  int row;           // first row of this CTA: varlen-M counted over all segments, varlen-K in D
  int rows;          // how many of its tile_m rows exist; 0: the CTA only helps to load B
  int begin;         // varlen-K: first row of the segment
  int end;           // first row past the segment
  bool awaits_rows;  // ready_first: rows of A may not be there yet
  // A resident B needs these:
  int in_run;    // how many tiles of the run came before
  int run_left;  // how many come after
  uint32_t run_phase;
};

}  // namespace tessera::cuda::gemm
