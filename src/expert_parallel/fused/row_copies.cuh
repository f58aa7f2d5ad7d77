// SPDX-License-Identifier: Apache-2.0
// One warp copies rows of x, of any GPU, to one or more places of this GPU's pool, by loads and stores of its lanes,
// 4 KB at a time: a row is loaded once, however many places it goes to, and counted as arrived at each of them when the
// next one is on its way. Rings of bulk copies, 10 KB for a warp, took 0 to 1% longer
// (docs/notebook/2026-11-23-converged-warps.md).
#pragma once

#include "cuda/arch/proxy_fence.cuh"
#include "expert_parallel/fused/forward_pass.cuh"

namespace tessera::expert_parallel {

class RowCopies {
 public:
  __device__ explicit RowCopies(Pass const& pass)
      : pass_(pass), row_bytes_(2 * pass.shape().hidden) {}

  // A converged warp copies a row to the pool's row `to` of each lane that has one (>= 0).
  __device__ void copy(char const* from, int to) {
    copy(from, to, [] {});
  }
  // The same; the warp calls meanwhile() when the row is on its way.
  template <class Meanwhile>
  __device__ void copy(char const* from, int to, Meanwhile meanwhile) {
    unsigned const places = __ballot_sync(arch::kAllLanes, to >= 0);
    for (int begin = 0; begin < row_bytes_; begin += kLoads * kBytes) {
      int const at = begin + 16 * arch::lane_idx();
      uint4 part[kLoads];
      TESSERA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        if (at + i * kBytes < row_bytes_) {
          part[i] = __ldcg(reinterpret_cast<uint4 const*>(from + at + i * kBytes));
        }
      }
      if (begin == 0) {
        meanwhile();
        announce();
      }
      for (unsigned left = places; left != 0; left &= left - 1) {
        std::int64_t const row =
            __shfl_sync(arch::kAllLanes, to, __ffs(static_cast<int>(left)) - 1);
        char* const gmem = pass_.p.exchange.gmem_pool + row * row_bytes_ + at;
        TESSERA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (at + i * kBytes < row_bytes_) *reinterpret_cast<uint4*>(gmem + i * kBytes) = part[i];
        }
      }
    }
    unannounced_ = to;
  }
  // Announces the last row as well.
  __device__ void finish() { announce(); }

 private:
  static constexpr int kLoads = 8;  // of a lane in flight
  static constexpr int kBytes = 16 * arch::kWarpThreads;

  __device__ void announce() {
    arch::fence_proxy_async_global();  // TMA reads what every lane has written
    __syncwarp();
    if (unannounced_ < 0) return;
    LocalLayout const& local = pass_.p.exchange.local;
    arch::fence_acq_rel_gpu();
    atomicAdd(pass_.local_word(local.arrived(pass_.epoch, unannounced_ / kPlain.tile.m)), 1u);
    unannounced_ = -1;
  }

  Pass const& pass_;
  int row_bytes_;
  int unannounced_ = -1;  // of a lane: its row of the last ones
};

}  // namespace tessera::expert_parallel
