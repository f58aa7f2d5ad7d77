// SPDX-License-Identifier: Apache-2.0
// The warps that multiply announce the results of a task without a fence: each notes in shared memory that it has sent
// its rows, and the warp that schedules counts the task once all have. With the last down task of a block that warp
// fences at system scope, once for all down tasks of the block.
//   full    every consumer warp arrives when it has issued its stores for the task, and its bulk stores are complete
//   empty   the announcing warp arrives when the slot may be taken again
// Memory  barriers of the CTA order the warps' writes before the announcing lane's count, which releases them at the
//         scope of the GPU, as __syncthreads does before one thread's part in a barrier of the grid
#pragma once

#include "expert_parallel/fused/forward_pass.cuh"

namespace tessera::expert_parallel {

// One consumer warp announces tasks through it.
class SentTasks {
 public:
  __device__ explicit SentTasks(SentQueue& queue) : queue_(queue) {}

  // Announces that this warp's results of the task are on their way. All warps announce the same tasks in the same
  // order. All lanes wait: the compiler takes a warp for divided after one lane's loop.
  __device__ void announce(SentTask const& task, bool first_warp) {
    __syncwarp();
    arch::mbarrier_wait(&queue_.empty[slot_], phase_ ^ 1);
    if (arch::lane_idx() == 0) {
      if (first_warp) queue_.task[slot_] = task;
      arch::mbarrier_arrive(&queue_.full[slot_]);
    }
    __syncwarp();
    if (++slot_ == kSentSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  SentQueue& queue_;
  int slot_ = 0;
  std::uint32_t phase_ = 0;
};

// After the last down task of a block, signals to the sources of its rows. Rows are in order of their sources, so these
// are the ones whose range overlaps the block.
__device__ inline void announce_block(Pass const& pass, int local_expert, int block) {
  ExchangeArguments const& p = pass.p.exchange;
  int const expert = p.rank * p.local_experts + local_expert;
  int const first = (block - pass.plan()[expert].first_block) * p.shape.block_rows;
  arch::fence_acq_rel_sys();  // for those that have counted as well
  int row = 0, source = p.rank;
  for (int turn = 0; turn < p.shape.ranks; ++turn, source = source_after(p.shape, source)) {
    int const end = row + pass.counts().at(source, expert);
    if (end > row && row < first + p.shape.block_rows && end > first) {
      Peer const to = peer_of(p, source);
      to.signal(p.window.block_done_word(p.rank, block), pass.epoch);
    }
    row = end;
  }
}

// One converged warp announces what all consumer warps have sent.
class SentAnnouncer {
 public:
  __device__ explicit SentAnnouncer(Pass const& pass) : pass_(pass) {}

  // Announces the tasks that all warps have sent by now.
  __device__ void poll() {
    while (next_ != kEnd &&
           __all_sync(arch::kAllLanes, arch::mbarrier_test_wait(&full(), phase()))) {
      announce();
    }
  }
  // Announces until the consumers have no more tasks.
  __device__ void finish() {
    while (next_ != kEnd) {
      arch::mbarrier_wait(&full(), phase());
      announce();
    }
  }

 private:
  static constexpr int kEnd = -1;

  __device__ int slot() const { return next_ % kSentSlots; }
  __device__ std::uint32_t phase() const { return next_ / kSentSlots & 1; }
  __device__ arch::Mbarrier& full() const { return pass_.smem.sent.full[slot()]; }
  __device__ void announce() {
    SentTask const task = pass_.smem.sent.task[slot()];
    __syncwarp();
    bool const is_task = task.block != kNoBlock;
    if (arch::lane_idx() == 0) {
      arch::mbarrier_arrive(&pass_.smem.sent.empty[slot()]);
      if (is_task) count(task);
    }
    __syncwarp();
    next_ = is_task ? next_ + 1 : kEnd;
  }
  __device__ void count(SentTask const& task) const {
    LocalLayout const& local = pass_.p.exchange.local;
    if ((task.kind_and_expert & kDownTask) == 0) {
      arch::add_release_gpu(pass_.local_word(local.a_ready(pass_.epoch, task.block)), 1);
      return;
    }
    std::uint32_t const before =
        arch::count_acq_rel_gpu(pass_.local_word(local.down_tiles(pass_.epoch, task.block)), 1);
    if (before + 1 == static_cast<std::uint32_t>(pass_.shape().down_tiles())) {
      announce_block(pass_, task.kind_and_expert & (kDownTask - 1), task.block);
    }
  }

  Pass const& pass_;
  int next_ = 0;  // task to be announced; kEnd: there are no more
};

}  // namespace tessera::expert_parallel
