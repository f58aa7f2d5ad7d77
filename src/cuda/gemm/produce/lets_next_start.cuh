// SPDX-License-Identifier: Apache-2.0
// A kernel between two others that lets the next one start while it works. The next one needs what the previous one
// makes, so this one says that it may start once the previous one has ended. Every CTA has to say so, or to end; it
// does after so many k_tiles, whatever tiles they belong to: a tile may be as long as a whole expert.
#pragma once

#include "../../arch/dependent_launch.cuh"
#include "../config.hpp"
#include "../params.hpp"

namespace tessera::cuda::gemm {

// kWaits: this warp waits and speaks for its CTA. One does.
template <GemmConfig kGemm, bool kWaits>
class LetsNextStart {
  static constexpr bool kActive = kWaits && kGemm.takes_over();

 public:
  __device__ __forceinline__ explicit LetsNextStart(GemmParams const& p)
      : k_tiles_left_(kActive ? p.k_tiles_before_next : 0) {}

  // Called before the loads of every k_tile, by converged warps.
  __device__ __forceinline__ void count_k_tile() {
    if constexpr (kActive) {
      if (--k_tiles_left_ == 0) {
        arch::wait_for_previous_kernel();
        arch::let_next_kernel_start();
      }
    }
  }

  // No kernel ends before the previous one.
  __device__ __forceinline__ void at_end() const {
    if (kActive && k_tiles_left_ > 0) arch::wait_for_previous_kernel();
  }

 private:
  int k_tiles_left_;
};

}  // namespace tessera::cuda::gemm
