// SPDX-License-Identifier: Apache-2.0
// The ring of announced work tiles, as the roles read it: one warp announces (scheduler.cuh), the others read.
//   announcer: wait work_empty[slot], write work[slot], arrive on work_full[slot]
//   reader:    wait work_full[slot], read work[slot], arrive on work_empty[slot]
#pragma once

#include "../arch/cluster.cuh"
#include "../arch/mbarrier.cuh"
#include "../arch/warp.cuh"
#include "storage.cuh"
#include "work_tile.hpp"

namespace tessera::cuda::gemm {

// A message to the readers is {segment | n_tile << 16, first row of the block or kNoTile, end, begin}; with a resident
// B the rows of the run come last, and with ready_first whether rows have to be awaited. kNoTile says that there are no
// more tiles.
constexpr int kNoTile = -1;

// A warp's view of the announced tiles. Every reading warp must read every tile. kArms: this reader arms the barriers
// of messages that come from another CTA.
template <GemmConfig kGemm, bool kArms = false>
class WorkQueue {
 public:
  __device__ __forceinline__ explicit WorkQueue(SharedStorage<kGemm>& smem) : smem_(smem) {}

  // The next tile, or false after the last one. Called by converged warps.
  __device__ __forceinline__ bool read(WorkTile& tile) {
    if constexpr (kGemm.keeps_b()) {
      if (run_left_ > 0) {
        next_of_run(tile);
        return true;
      }
    }
    if constexpr (kGemm.cluster_m() == 1) {
      arch::mbarrier_wait(&smem_.work_full[slot_], phase_);
    } else {
      arch::mbarrier_wait_cluster(&smem_.work_full[slot_], phase_);
    }
    int4 const message = smem_.work[slot_];
    if (message.y == kNoTile) return false;
    __syncwarp();
    if (arch::lane_idx() == 0) {
      if constexpr (kArms && kGemm.cluster_m() > 1) {
        arch::mbarrier_arrive_expect_tx(&smem_.work_full[slot_], sizeof(int4));
      }
      if constexpr (kGemm.cluster_m() == 1) {
        arch::mbarrier_arrive(&smem_.work_empty[slot_]);
      } else {
        arch::mbarrier_arrive_cluster(&smem_.work_empty[slot_], 0);
      }
    }
    if (++slot_ == kWorkSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
    place(tile, message);
    if constexpr (kGemm.keeps_b()) {
      constexpr int kPairM = kGemm.pair_m();
      run_left_ = (message.w + kPairM - 1) / kPairM * 2 - 1;
      run_phase_ ^= 1;
      tile.in_run = 0;
      tile.run_left = run_left_;
      tile.run_phase = run_phase_;
    }
    return true;
  }

  // The tile that read() gives next, or false after the last one.
  __device__ __forceinline__ bool peek(WorkTile& tile) const {
    static_assert(!kGemm.keeps_b() && kGemm.cluster_m() == 1);
    arch::mbarrier_wait(&smem_.work_full[slot_], phase_);
    int4 const message = smem_.work[slot_];
    if (message.y == kNoTile) return false;
    place(tile, message);
    return true;
  }

 private:
  // `tile` is the one read before.
  __device__ __forceinline__ void next_of_run(WorkTile& tile) {
    tile.row += kGemm.tile.m;
    tile.rows = max(0, min(kGemm.tile.m, tile.end - tile.row));
    ++tile.in_run;
    tile.run_left = --run_left_;
  }

  // This CTA's share of the block's rows.
  __device__ __forceinline__ static void place(WorkTile& tile, int4 message) {
    tile.segment = message.x & 0xffff;
    tile.n_tile = message.x >> 16;
    tile.begin = message.w;
    tile.end = message.z;
    if constexpr (kGemm.order.ready_first) tile.awaits_rows = message.w != 0;
    int const left = message.z - message.y;
    if constexpr (kGemm.varlen_k()) {
      int const rank = kGemm.cluster_m() == 1 ? 0 : static_cast<int>(arch::cluster_cta_rank());
      tile.row = message.y + rank * kGemm.tile.m;
      tile.rows = kGemm.tile.m;
    } else if constexpr (kGemm.cluster_m() == 1) {
      tile.row = message.y;
      tile.rows = min(kGemm.tile.m, left);
    } else {
      constexpr int kUnit = kGemm.cluster_m() * kSubtileM;
      int const share = min(kGemm.tile.m, (left + kUnit - 1) / kUnit * kSubtileM);
      int const skipped = static_cast<int>(arch::cluster_cta_rank()) * share;
      tile.row = message.y + skipped;
      tile.rows = max(0, min(share, left - skipped));
    }
  }

  SharedStorage<kGemm>& smem_;
  int slot_ = 0;
  uint32_t phase_ = 0;
  int run_left_ = 0;        // tiles of the run to come
  uint32_t run_phase_ = 1;  // parity of the run's number
};

}  // namespace tessera::cuda::gemm
