// SPDX-License-Identifier: Apache-2.0
// A pair of CTAs draws tasks together: CTA 0 draws a ticket for both, and in each a warp walks to its own task, waits
// for what it needs and marks it loadable.
//   CTA 0   wait [may_draw] | draw | ticket to CTA 1 [its tickets]      CTA 1   wait [tickets]
//   each    task to the readers of its work ring | wait for A [arrived, a_ready] | mark it [loadable]
#pragma once

#include "cuda/arch/cluster_load.cuh"
#include "cuda/gemm/scheduler.cuh"
#include "expert_parallel/fused/sent_tasks.cuh"

namespace tessera::expert_parallel {

// One converged warp announces the tasks of its CTA to the readers of its work ring.
class Tasks {
 public:
  __device__ explicit Tasks(Pass const& pass)
      : pass_(pass),
        first_expert_(pass.p.exchange.rank * pass.p.exchange.local_experts),
        cursor_(pass.shape(), pass.plan(), pass.p.exchange.rank, lag(pass)) {}

  // The announced task needs this counter of this GPU to reach `count` before its A may be read.
  struct Needs {
    std::int64_t counter;
    std::uint32_t count;
    Site site;
  };
  __device__ Needs const& needs() const { return needs_; }

  // Tickets ascend. Returns false, and announces it to the readers, if there are no more tasks.
  __device__ bool announce(std::int64_t ticket) {
    int4 message{0, gemm::kNoTile, 0, 0};
    TaskPair pair;
    bool const found = cursor_.find(ticket, pair);
    if (found) message = place(pair);
    arch::mbarrier_wait(&pass_.smem.gemm.work_empty[slot_], phase_ ^ 1);
    if (arch::lane_idx() == 0) {
      pass_.smem.gemm.work[slot_] = message;
      arch::mbarrier_arrive(&pass_.smem.gemm.work_full[slot_]);
    }
    __syncwarp();
    if (++slot_ == gemm::kWorkSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
    return found;
  }

 private:
  __device__ static int lag(Pass const& pass) {
    if (pass.p.lag >= 0) return pass.p.lag;
    return default_lag(pass.shape(), owner_totals(pass.shape(), pass.plan(), pass.p.exchange.rank));
  }
  __device__ int4 place(TaskPair const& pair) {
    ExchangeShape const& shape = pass_.shape();
    LocalLayout const& words = pass_.p.exchange.local;
    bool const is_second = arch::cluster_cta_rank() != 0;
    bool const has_task = !is_second || pair.has_second;
    Task const task = is_second && has_task ? pair.second() : pair.first;  // none: as the first
    int const local = task.expert - first_expert_;
    ExpertPlan const expert = pass_.smem.plan[local];
    int const left = expert.rows - (task.block - expert.first_block) * shape.block_rows;
    int const rows = min(left, shape.block_rows);
    int const row = task.block * shape.block_rows;
    if (task.kind == TaskKind::down) {
      needs_ = {words.a_ready(pass_.epoch, task.block),
                static_cast<std::uint32_t>(shape.up_tiles()), Site::a_ready};
    } else {
      needs_ = {words.arrived(pass_.epoch, task.block), static_cast<std::uint32_t>(rows),
                Site::arrived};
    }
    int const kind =
        (task.kind == TaskKind::down ? kDownTask : 0) | (pair.shares_rows ? kSharedRows : 0);
    return {local | kind | task.tile << 16, row, has_task ? row + rows : row, 0};
  }

  Pass const& pass_;
  int first_expert_;  // of this rank
  TaskCursor cursor_;
  Needs needs_ = {0, 0, Site::none};
  int slot_ = 0;
  std::uint32_t phase_ = 0;
};

// The tickets of a pair of CTAs; its first one is the pair's number. One converged warp of each CTA has a Tickets.
class Tickets {
 public:
  __device__ explicit Tickets(Pass const& pass) : pass_(pass) {}

  __device__ static std::int64_t first() { return blockIdx.x / kCtasOfPair; }

  // Returns the next one once it may be drawn, and calls meanwhile() until then.
  template <class Meanwhile>
  __device__ std::int64_t next(Meanwhile meanwhile) {
    DrawnTickets& tickets = pass_.smem.tickets;
    std::uint32_t drawn = 0;
    if (arch::cluster_cta_rank() == 0) {
      await(pass_.smem.schedule.may_draw, turn_ & 1, meanwhile);
      arch::sleep_ns(gemm::kDrawSleepNs);
      if (arch::lane_idx() == 0) {
        drawn = atomicAdd(pass_.local_word(pass_.p.exchange.local.tickets(pass_.epoch)), 1u);
      }
      drawn = __shfl_sync(arch::kAllLanes, drawn, 0);
      if (arch::lane_idx() == 0) {
        arch::st_async(&tickets.drawn[slot()], &tickets.full[slot()], 1,
                       int4{static_cast<int>(drawn), 0, 0, 0});
      }
    } else {
      await(tickets.full[slot()], turn_ / kTicketSlots & 1, meanwhile);
      arch::mbarrier_wait_cluster(&tickets.full[slot()], turn_ / kTicketSlots & 1);
      drawn = static_cast<std::uint32_t>(tickets.drawn[slot()].x);
      __syncwarp();
      if (arch::lane_idx() == 0) expect(tickets, slot());
    }
    __syncwarp();
    ++turn_;
    return std::int64_t{gridDim.x} / kCtasOfPair + drawn;
  }

  // One thread calls it before CTA 0 draws.
  __device__ static void init(DrawnTickets& tickets) {
    for (int slot = 0; slot < kTicketSlots; ++slot) {
      arch::mbarrier_init(&tickets.full[slot], 1);
      expect(tickets, slot);
    }
  }

 private:
  __device__ static void expect(DrawnTickets& tickets, int slot) {
    arch::mbarrier_arrive_expect_tx(&tickets.full[slot], sizeof tickets.drawn[slot]);
  }
  template <class Meanwhile>
  __device__ static void await(arch::Mbarrier& barrier, std::uint32_t phase, Meanwhile meanwhile) {
    while (!__all_sync(arch::kAllLanes, arch::mbarrier_test_wait(&barrier, phase))) meanwhile();
  }
  __device__ int slot() const { return static_cast<int>(turn_ % kTicketSlots); }

  Pass const& pass_;
  std::uint32_t turn_ = 0;
};

// One converged warp finds a task while the one before is loaded, announces it, and waits for what it needs; between
// two looks it announces what the consumers have sent. The warp that loads does none of this, as its loads are hardly
// ahead of the k loop (lesson 3).
__device__ inline void schedule(Pass const& pass) {
  SentAnnouncer sent(pass);
  auto const announce_sent = [&] { sent.poll(); };
  Tasks tasks(pass);
  Tickets tickets(pass);
  std::int64_t ticket = Tickets::first();
  while (tasks.announce(ticket)) {
    auto const& needs = tasks.needs();
    pass.wait_count(needs.counter, needs.count, needs.site, announce_sent);
    if (arch::lane_idx() == 0) arch::mbarrier_arrive(&pass.smem.schedule.loadable);
    __syncwarp();
    ticket = tickets.next(announce_sent);
  }
  sent.finish();
}

}  // namespace tessera::expert_parallel
