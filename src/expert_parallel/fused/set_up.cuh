// SPDX-License-Identifier: Apache-2.0
// A CTA of the fused kernel sets up between routing and its roles: barriers, copies of what the roles read of the plan,
// and the agreement of both CTAs of a pair that they begin.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/cluster_load.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "expert_parallel/fused/schedule_tasks.cuh"

namespace tessera::expert_parallel {

// Copies what the roles read of counts and plan into their shared memory.
template <bool kCrossOnce>
__device__ void copy_plan(Pass const& pass, RouteStorage<kForwardThreads> const& route) {
  ExchangeArguments const& p = pass.p.exchange;
  CountMatrix const counts{route.counts, p.shape.experts};
  int const local = p.local_experts;
  for (int i = static_cast<int>(threadIdx.x); i < p.shape.experts; i += kForwardThreads) {
    int const source = p.owner(i), expert = p.rank * local + i - source * local;
    pass.smem.counts()[i] = counts.at(source, expert);
    pass.smem.list_begin[i] = route.list_begin[i];
    if constexpr (kCrossOnce) {
      pass.smem.pool_begin[i] = route.plan[expert].first_block * p.shape.block_rows +
                                rows_ahead(p.shape, counts, expert, p.rank, source);
    }
    if (i < local) pass.smem.plan[i] = route.plan[p.rank * local + i];
    if (p.shape.ranks > 1) {
      pass.smem.pool_rows()[i] =
          static_cast<std::int32_t>(pool_row_of_pair(p.shape, counts, route.plan, i, p.rank, 0));
    }
  }
}

// One thread calls it while the others route.
__device__ inline void init_barriers(ForwardStorage& smem) {
  smem.failed = 0;
  for (int slot = 0; slot < kSentSlots; ++slot) {
    arch::mbarrier_init(&smem.sent.full[slot], kConsumerWarps);
    arch::mbarrier_init(&smem.sent.empty[slot], 1);
  }
  arch::mbarrier_init(&smem.schedule.may_draw, 1);
  arch::mbarrier_init(&smem.schedule.loadable, 1);
  Tickets::init(smem.tickets);
  gemm::init_pipeline<kPlain>(smem.gemm);
}

// Says whether both CTAs of a pair have a plan, as neither can load without the other. All threads call it.
__device__ inline bool begin_together(ForwardStorage& smem, bool planned) {
  if (threadIdx.x == 0) smem.planned = planned ? 1 : 0;
  arch::fence_proxy_async_shared();  // routing wrote where TMA will
  __syncwarp();
  arch::cluster_sync();
  int both = planned ? 1 : 0;
  if (planned && arch::lane_idx() == 0) {
    both = arch::load_from_cta(&smem.planned, arch::cluster_cta_rank() ^ 1).x;
  }
  // The compiler takes warps for divided behind a branch that it cannot judge.
  if (__shfl_sync(arch::kAllLanes, both, 0) != 0) return true;
  arch::cluster_sync();  // the other one has read our word
  return false;
}

}  // namespace tessera::expert_parallel
