// SPDX-License-Identifier: Apache-2.0
// A consumer warp finishes its last task under the k loop of the next one.
#pragma once

#include "expert_parallel/fused/sent_tasks.cuh"

namespace tessera::expert_parallel {

// Does what a warp has to do for its last task: store the results of a down task, with kSaves h of an up task too,
// piece by piece; wait until a of an up task is in memory; then announce the task.
template <class Push, bool kSaves>
class LastTask {
 public:
  __device__ LastTask(Pass const& pass, Push& push, int consumer)
      : sent_(pass.smem.sent),
        push_(push),
        first_warp_(consumer == 0 && arch::warp_in_warpgroup() == 0) {}

  // Takes a task whose results are on their way, or held in `push`. The one before was finished.
  __device__ void begin(SentTask const& task, bool down) {
    task_ = task;
    up_is_on_its_way_ = !down;
  }
  // Announces a task of which the warp has no rows. The one before was finished.
  __device__ void announce(SentTask const& task) { sent_.announce(task, first_warp_); }

  // Says that a k_tile which has not arrived may be waiting for the last task.
  __device__ bool is_awaited() const { return up_is_on_its_way_; }
  // Waits until a is in memory, not merely read from shared memory, and announces the up task.
  __device__ void complete_up() {
    if (arch::lane_idx() == 0) arch::bulk_store_wait<0>();
    announce(task_);
    up_is_on_its_way_ = false;
  }
  // Does the next piece, if there is one.
  __device__ void step() {
    if (!push_.pending()) return;
    bool const is_h = kSaves && (task_.kind_and_expert & kDownTask) == 0;
    if constexpr (kSaves) {
      push_.work_of(push_.next(), is_h);
    } else {
      push_.work(push_.next());
    }
    if (!is_h && !push_.pending()) announce(task_);
  }
  __device__ void finish() {
    if (up_is_on_its_way_) complete_up();
#pragma unroll 1
    while (push_.pending()) step();
  }

 private:
  SentTasks sent_;
  Push& push_;
  bool first_warp_;
  SentTask task_ = {};
  bool up_is_on_its_way_ = false;
};

// Works in the k loop of a task (gemm::BetweenKTiles): returns the lent stages of the last up task under the first
// k_tile, and does a piece of the last task, if it has any, behind each later one. An up task is completed some k_tiles
// later, or as soon as a k_tile is not there, as that may be what other ranks wait for.
template <class Up, class Last>
class BetweenTasks {
 public:
  __device__ BetweenTasks(gemm::SharedStorage<kPlain>& smem, Up& up, Last& last)
      : smem_(smem), up_(up), last_(last) {}

  __device__ __forceinline__ void before(int k_tile, gemm::PipelineState<kPlain> const& state) {
    if (!last_.is_awaited()) return;
    bool const there = arch::mbarrier_try_wait(&smem_.full[state.stage], state.phase);
    if (k_tile == kCompleteAt || __any_sync(arch::kAllLanes, !there)) last_.complete_up();
  }
  __device__ __forceinline__ void first() { up_.settle(); }
  __device__ __forceinline__ void later() { last_.step(); }
  __device__ __forceinline__ void each(int) {}

 private:
  static constexpr int kCompleteAt = 4;  // k_tile: when stores have arrived

  gemm::SharedStorage<kPlain>& smem_;
  Up& up_;
  Last& last_;
};

}  // namespace tessera::expert_parallel
