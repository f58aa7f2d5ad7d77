// SPDX-License-Identifier: Apache-2.0
// forward: o_t = sum over choices of s * (act(x_t w_up[e]^T) w_down[e]^T), experts on all GPUs, one launch.
// Schedule persistent, one CTA per SM on every GPU. All CTAs route and plan (route.cuh), then by role:
//   WG0 warp 0     | TMA loads
//       warps 1, 2 | pull rows into the pool in the order of the tasks -> arrived
//       warp 3     | draws tickets [next]; lets a task be loaded [there] once [arrived] or [a_ready] says that A is
//                  | there; announces what the consumers have sent [sent] -> a_ready; down_tiles, block_done
//   WG1, 2         | first: rows of the first tasks, all of them or this rank's own -> arrived
//                  | multiply; up: a by TMA, complete under the next task; down: rows to slots on their
//                  | sources -> sent; last: aggregate the slice's tokens [block_done]
// Tasks    TaskCursor: ups, with downs behind by `lag` units
// Barriers pipeline, lent stages and work ring of block/; the queue of sent tasks (sent_tasks.cuh); next, there
// Numerics fp32 accumulate, one rounding for a, y and o each; choices are added in their order: the bits
//          do not depend on P, nor on who computes a task
// Faults   a wait that fails lets every later wait pass: the kernel ends, o is void, the Fault says why
#pragma once

#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "dist/kernels/pull_rows.cuh"
#include "dist/kernels/push_rows.cuh"
#include "dist/kernels/sent_tasks.cuh"
#include "dist/kernels/slot_sums.cuh"
#include "dist/kernels/store_rows.cuh"

namespace tessera::dist {

// Draws tickets and announces tasks to the readers of the work ring. One converged warp.
class Tasks {
 public:
  __device__ explicit Tasks(Pass const& pass)
      : pass_(pass),
        first_expert_(pass.p.exchange.rank * pass.shape().local_experts()),
        cursor_(pass.shape(), pass.plan(), pass.p.exchange.rank, lag(pass)),
        tickets_(cursor_.tickets()) {}

  __device__ void announce_first() {
    ticket_ = blockIdx.x;
    announce();
  }
  __device__ void draw() {
    if (arch::lane_idx() == 0) {
      drawn_ = atomicAdd(pass_.local_word(pass_.p.exchange.local.tickets(pass_.epoch)), 1u);
    }
  }
  __device__ void announce_drawn() {
    ticket_ = std::int64_t{gridDim.x} + __shfl_sync(arch::kAllLanes, drawn_, 0);
    announce();
  }
  // What the announced task needs of this GPU before its A may be read.
  struct Needs {
    std::int64_t counter = -1;  // none: there is no task
    std::uint32_t count = 0;
    Site site = Site::none;
  };
  __device__ Needs const& needs() const { return needs_; }
  __device__ bool more() const { return ticket_ < tickets_; }

 private:
  __device__ static int lag(Pass const& pass) {
    if (pass.p.lag >= 0) return pass.p.lag;
    return default_lag(pass.shape(),
                       owner_totals(pass.shape(), pass.plan(), pass.p.exchange.rank).units);
  }
  __device__ void announce() {
    int4 message{0, block::kNoTile, 0, 0};
    needs_ = {};
    if (ticket_ < tickets_) {
      Task const task = cursor_.at(ticket_);
      ExchangeShape const& shape = pass_.shape();
      LocalLayout const& words = pass_.p.exchange.local;
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
      int const kind = task.kind == TaskKind::down ? kDownTask : 0;
      message = {local | kind | task.tile << 16, row, row + rows, 0};
    }
    arch::mbarrier_wait(&pass_.smem.gemm.work_empty[slot_], phase_ ^ 1);
    if (arch::lane_idx() == 0) {
      pass_.smem.gemm.work[slot_] = message;
      arch::mbarrier_arrive(&pass_.smem.gemm.work_full[slot_]);
    }
    __syncwarp();
    if (++slot_ == block::kWorkSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  Pass const& pass_;
  int first_expert_;  // of this rank
  TaskCursor cursor_;
  Needs needs_ = {};
  std::int64_t tickets_;
  std::int64_t ticket_ = 0;
  std::uint32_t drawn_ = 0;  // of lane 0
  int slot_ = 0;
  std::uint32_t phase_ = 0;
};

// One converged warp: draws a task while the one before is loaded, announces it, and waits for what it needs; between
// two looks it announces what the consumers have sent. The warp that loads does none of this, as its loads are hardly
// ahead of the k loop (docs/notebook/2026-11-23-fused-producer.md).
__device__ inline void schedule(Pass const& pass) {
  // ns. Warps of all SMs wake together and draw at once, and then consecutive tickets, which read the same weights and
  // rows, go to SMs that are near each other: one read across the halves of L2 serves several
  // (docs/notebook/2026-11-23-fused-draws.md).
  constexpr std::uint32_t kDrawSleep = 2000;
  ScheduleBarriers& barriers = pass.smem.schedule;
  SentAnnouncer sent(pass);
  auto const announce_sent = [&] { sent.poll(); };
  Tasks tasks(pass);
  std::uint32_t phase = 0;
  tasks.announce_first();
  while (tasks.more()) {
    auto const& needs = tasks.needs();
    pass.wait_count(needs.counter, needs.count, needs.site, announce_sent);
    if (arch::lane_idx() == 0) arch::mbarrier_arrive(&barriers.there);
    __syncwarp();
    while (!__all_sync(arch::kAllLanes, arch::mbarrier_test_wait(&barriers.next, phase))) {
      sent.poll();
    }
    phase ^= 1;
    arch::sleep_ns(kDrawSleep);
    tasks.draw();
    tasks.announce_drawn();
  }
  sent.finish();
}

template <ActivationKind kKind>
__device__ void produce(Pass const& pass) {
  // k_tiles. Drawn no earlier than needed: of two tickets one after the other one would wait for the end of a long
  // task, the other for that of a short one, and the weights that both read would have left L2 in between.
  constexpr int kDrawAhead = 8;
  constexpr block::GemmConfig kUp = up_gemm(kKind);
  ForwardStorage& smem = pass.smem;
  ForwardParams const& p = pass.p;
  block::WorkQueue<kPlain> queue(smem.gemm);
  block::PipelineState<kPlain> state;
  block::WorkTile tile;
  std::uint32_t phase = 0;
  while (queue.read(tile)) {
    bool const down = (tile.segment & kDownTask) != 0;
    tile.segment &= kDownTask - 1;
    int const k_tiles = down ? p.down.k_tiles : p.up.k_tiles;
    arch::mbarrier_wait(&smem.schedule.there, phase);
    phase ^= 1;
    arch::fence_proxy_async_global();
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      block::wait_empty<kPlain>(smem.gemm, state);
      if (arch::lane_idx() == 0) {  // the lane that acquired
        if (k_tile == max(k_tiles - kDrawAhead, 0)) arch::mbarrier_arrive(&smem.schedule.next);
        arch::Mbarrier* const full = &smem.gemm.full[state.stage];
        arch::mbarrier_arrive_expect_tx(full, kPlain.a_tile_bytes() + kPlain.b_tile_bytes());
        block::GemmParams const& gemm = down ? p.down : p.up;
        arch::tma_load(smem.gemm.a[state.stage], &gemm.a, full, k_tile * kPlain.tile.k, tile.row);
        if (down) {
          block::load_b<kPlain>(smem.gemm, p.down, state.stage, k_tile, tile);
        } else {
          block::load_b<kUp>(smem.gemm_of<kUp>(), p.up, state.stage, k_tile, tile);
        }
      }
      __syncwarp();
      state.advance();
    }
    for (int lent = down ? kLentToDown : lent_to_up(kKind); lent > 0; --lent) {
      block::wait_empty<kPlain>(smem.gemm, state);
      if (arch::lane_idx() == 0) arch::mbarrier_arrive(&smem.gemm.full[state.stage]);
      __syncwarp();
      state.advance();
    }
  }
}

// block::multiply with a moment in it: what this warp sent for its last task is completed while a later k_tile of
// this one is multiplied. Earlier where a k_tile is not there yet, as it may be waiting for what we have to tell.
template <class Complete>
__device__ int multiply(ForwardStorage& smem, block::PipelineState<kPlain>& state,
                        block::BorrowedStages<kPlain>& stages,
                        block::Accumulators<kPlain> (&acc)[1], int row, int k_tiles, bool sent,
                        Complete complete) {
  constexpr int kCompleteAt = 4;  // k_tile: when stores have arrived
  int previous = 0;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    if (sent) {
      bool const there = arch::mbarrier_try_wait(&smem.gemm.full[state.stage], state.phase);
      if (k_tile == kCompleteAt || __any_sync(arch::kAllLanes, !there)) {
        complete();
        sent = false;
      }
    }
    block::wait_full<kPlain>(smem.gemm, state);
    block::issue<kPlain, 1>(smem.gemm, state, acc, row, k_tile);
    if (k_tile > 0) {
      arch::wgmma_wait<1>();
      block::release_stage<kPlain>(smem.gemm, previous);
    } else {
      stages.settle();
    }
    previous = state.stage;
    state.advance();
  }
  if (sent) complete();
  return previous;
}

template <ActivationKind kKind>
__device__ void consume(Pass const& pass, int consumer) {
  ForwardStorage& smem = pass.smem;
  ForwardParams const& p = pass.p;
  int const row = consumer * block::kSubtileM;
  block::WorkQueue<kPlain> queue(smem.gemm);
  block::PipelineState<kPlain> state;
  block::Accumulators<kPlain> acc[1];
  block::BorrowedStages<kPlain> stages(smem.gemm, consumer);
  StoreRows<kKind> up(pass, stages);
  Push push(pass, stages, consumer);
  SentTasks sent_tasks(smem.sent);
  bool const first_warp = consumer == 0 && arch::warp_in_warpgroup() == 0;
  SentTask up_task = {};
  // a is there, not merely read from shared memory.
  auto const complete = [&] {
    if (arch::lane_idx() == 0) arch::bulk_store_wait<0>();
    sent_tasks.tell(up_task, first_warp);
  };
  bool sent = false;  // an up task, not complete yet when the next task begins
  block::WorkTile tile, ahead;
  bool more = queue.read(tile);
  while (more) {
    bool const down = (tile.segment & kDownTask) != 0;
    SentTask const task = {tile.segment, tile.row / pass.shape().block_rows};
    tile.segment &= kDownTask - 1;
    int const k_tiles = down ? p.down.k_tiles : p.up.k_tiles;
    if (tile.rows > row) {
      int const last = multiply(smem, state, stages, acc, row, k_tiles, sent, complete);
      more = queue.read(ahead);  // under the last wgmmas
      char* const to = down ? push.destination(tile, row) : nullptr;
      arch::wgmma_wait<0>();
      block::release_stage<kPlain>(smem.gemm, last);
      if (down) {
        push.store(acc[0], tile, to, state);
      } else {
        up.store(acc[0], tile, tile.row + row, state);
      }
    } else {
      if (sent) complete();
      stages.settle();
      int const lent = down ? kLentToDown : lent_to_up(kKind);
      block::pass<kPlain>(smem.gemm, state, k_tiles + lent, consumer);
      more = queue.read(ahead);
    }
    sent = !down;
    if (sent) {
      up_task = task;
    } else {
      sent_tasks.tell(task, first_warp);
    }
    if (!more && sent) complete();
    tile = ahead;
  }
  sent_tasks.tell({0, kNoBlock}, first_warp);
}

// What the roles keep of counts and plan.
__device__ inline void keep_plan(Pass const& pass, RouteStorage<kForwardThreads> const& route) {
  ExchangeArguments const& p = pass.p.exchange;
  CountMatrix const counts{route.counts, p.shape.experts};
  int const local = p.shape.local_experts();
  for (int i = static_cast<int>(threadIdx.x); i < p.shape.experts; i += kForwardThreads) {
    pass.smem.counts()[i] = counts.at(i / local, p.rank * local + i % local);
    pass.smem.list_begin[i] = route.list_begin[i];
    if (i < local) pass.smem.plan[i] = route.plan[p.rank * local + i];
    if (p.shape.ranks > 1) {
      pass.smem.pool_rows()[i] =
          static_cast<std::int32_t>(pool_row_of_pair(p.shape, counts, route.plan, i, p.rank, 0));
    }
  }
}

// One thread, while the others route.
__device__ inline void init_barriers(ForwardStorage& smem) {
  smem.failed = 0;
  for (int slot = 0; slot < kSentSlots; ++slot) {
    arch::mbarrier_init(&smem.sent.full[slot], kConsumerWarps);
    arch::mbarrier_init(&smem.sent.empty[slot], 1);
  }
  arch::mbarrier_init(&smem.schedule.next, 1);
  arch::mbarrier_init(&smem.schedule.there, 1);
  block::init_pipeline<kPlain>(smem.gemm);
}

template <ActivationKind kKind>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward(__grid_constant__ ForwardParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<ForwardStorage*>(smem_raw);
  Pass const pass{p, smem, *p.exchange.gmem_epoch};
  // The stages are free until the roles begin.
  auto& routing = *reinterpret_cast<RouteStorage<kForwardThreads>*>(&smem.gemm.a);
  if (threadIdx.x == kForwardThreads - 1) init_barriers(smem);
  clear_next_bank<kForwardThreads>(p.exchange, pass.epoch);
  if (!route(p.exchange, routing, pass.epoch) || !make_plan(p.exchange, routing, pass.epoch))
    return;
  keep_plan(pass, routing);
  arch::fence_proxy_async_shared();  // routing wrote where TMA will
  __syncthreads();
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    arch::release_registers<kProducerRegisters>();
    int const warp = arch::warp_idx();
    if (warp == 0) {
      produce<kKind>(pass);
    } else if (warp <= kCommunicationWarps) {
      if (p.exchange.shape.transfer == Transfer::once) {
        pull_tokens(pass, warp - 1);
      } else {
        pull_rows(pass, warp - 1);
      }
    } else {
      schedule(pass);
    }
  } else {
    arch::acquire_registers<kConsumerRegisters>();
    int const warp = arch::warp_idx() - 4;
    if (p.exchange.shape.transfer == Transfer::once) {
      bring_first_tokens(pass, warp);
    } else {
      bring_own_rows(pass, warp);
    }
    consume<kKind>(pass, warpgroup - 1);
    arch::named_barrier_sync(kStagesFree, kConsumers * arch::kWarpgroupThreads);
    SlotSums(pass, warp).run();
  }
  __syncwarp();
  __syncthreads();
  if (threadIdx.x != 0) return;
  LocalLayout const& local = p.exchange.local;
  if (arch::count_acq_rel_gpu(pass.local_word(local.ended(pass.epoch)), 1) + 1 != gridDim.x) return;
  for (int r = 0; r < pass.shape().ranks; ++r) {
    arch::store_release_sys(
        word_of(p.exchange.windows[r], p.exchange.window.ack_word(p.exchange.rank)), pass.epoch);
  }
  *p.exchange.gmem_epoch = pass.epoch + 1;
#endif
}

template <ActivationKind kKind>
cudaError_t launch_forward_of(ForwardParams const& params, int sm_count, cudaStream_t stream) {
  cudaError_t const error =
      cudaFuncSetAttribute(forward<kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(ForwardStorage)));
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<ForwardParams*>(&params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(forward<kKind>),
                                     dim3(static_cast<unsigned>(sm_count)), dim3(kForwardThreads),
                                     arguments, sizeof(ForwardStorage), stream);
}

}  // namespace tessera::dist
