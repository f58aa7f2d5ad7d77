// SPDX-License-Identifier: Apache-2.0
// Rows of A that a kernel beside this one still brings while it runs. A block of the scheduler is ready if all of its
// rows are there before this kernel starts; those of a segment come first. All others are there when a word of the
// other kernel says so:
//   order   the ready blocks of all segments, then the others (scheduler.cuh), from the last segment on back to the
//           first, as L2 still has B of the last ones
//   wait    a producer reads the word before the first tile of the second kind, and then never again
// The other kernel has all of its CTAs on SMs before this one starts, so that whoever waits is waited for by nobody.
#pragma once

#include "../arch/signal.cuh"
#include "../arch/warp.cuh"
#include "params.hpp"
#include "work_tile.hpp"

namespace tessera::cuda::gemm {

// The blocks of one turn: first the ready ones, or at once all where nothing is on its way. For one converged warp.
class ReadyBlocks {
 public:
  __device__ __forceinline__ explicit ReadyBlocks(GemmParams const& p)
      : p_(p), is_first_turn_(p.gmem_ready_blocks != nullptr) {}

  // False: there are no more turns.
  __device__ __forceinline__ bool next_turn() {
    bool const more = is_first_turn_;
    is_first_turn_ = false;
    return more;
  }
  // The segment that stands at a place of this turn's order.
  __device__ __forceinline__ int at(int place, int segments) const {
    return awaits() ? segments - 1 - place : place;
  }
  // Returns how many of a segment's `blocks` belong to this turn.
  __device__ __forceinline__ int of_turn(int segment, int blocks) const {
    if (p_.gmem_ready_blocks == nullptr) return blocks;
    int const ready = min(__ldg(p_.gmem_ready_blocks + segment), blocks);
    return is_first_turn_ ? ready : blocks - ready;
  }
  // Blocks of a segment that stand before those of this turn.
  __device__ __forceinline__ int before(int segment) const {
    return awaits() ? __ldg(p_.gmem_ready_blocks + segment) : 0;
  }
  __device__ __forceinline__ bool awaits() const {
    return p_.gmem_ready_blocks != nullptr && !is_first_turn_;
  }

 private:
  GemmParams const& p_;
  bool is_first_turn_;
};

// The part of a producer warp.
class AwaitsRows {
 public:
  __device__ __forceinline__ explicit AwaitsRows(GemmParams const& p) : p_(p) {}

  // Returns when the rows of the tile may be loaded, by the threads of this warp. Called by converged warps.
  __device__ __forceinline__ void wait(bool awaits_rows) {
    if (!awaits_rows || all_are_there_) return;
    // All lanes leave at once: a warp whose lanes left by themselves would be divided from then on.
    while (!__all_sync(arch::kAllLanes, arch::load_acquire_gpu(p_.gmem_arrivals) == p_.arrivals)) {
    }
    all_are_there_ = true;
  }

 private:
  GemmParams const& p_;
  bool all_are_there_ = false;
};

}  // namespace tessera::cuda::gemm
