// SPDX-License-Identifier: Apache-2.0
// Saves what backward needs of a fused pass besides x: h, and tables of this rank's rows. Both lie without pads.
//   head     CTA 0 sends the row limit to all ranks; when it has the plan, it writes where the rows of an expert begin,
//            and signals to the host how many there are
//   tables   communication warps that have nothing left to pull write them (row_tables.cuh)
//   h        is rounded to bf16 and stored under the k loop of the next task, like rows of down tasks (push_rows.cuh)
#pragma once

#include "expert_parallel/exchange/row_tables.cuh"
#include "expert_parallel/fused/push_rows.cuh"

namespace tessera::expert_parallel {

// Counts how many of `all` rows are within the limit.
__device__ inline int held_rows(SavedPass const& saved, int all) {
  return static_cast<int>(min(std::int64_t{all}, saved.capacity));
}

// All threads of CTA 0 call it when the plan is made; the lists may be on their way. Returns false if a wait failed.
template <int kThreads>
__device__ bool begin_saved(Pass const& pass, RouteStorage<kThreads> const& route) {
  ExchangeArguments const& exchange = pass.p.exchange;
  SavedPass const& saved = pass.p.saved;
  PassPlan const plan = {{route.counts, exchange.shape.experts}, route.plan, route.list_begin};
  int const thread = static_cast<int>(threadIdx.x);
  int const all = owner_totals(exchange.shape, plan.plan, exchange.rank).rows;
  int const rows = held_rows(saved, all);
  if (rows < all && !saved.may_overflow && thread == 0) {
    Waiter(exchange, pass.epoch)
        .give_up(Site::rows, static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(all));
  }
  write_offsets(exchange, plan, saved.tables, rows, thread, kThreads);
  return signal_host(exchange, plan, pass.epoch, saved.host);
}

// Each of kCommunicationWarps warps of a CTA calls it. The lists have come, unless the pass has failed.
__device__ inline void write_saved_rows(Pass const& pass, int warp) {
  if (pass.failed()) return;
  ExchangeArguments const& exchange = pass.p.exchange;
  SavedPass const& saved = pass.p.saved;
  PassPlan const plan = {pass.counts(), pass.plan(), pass.smem.list_begin};
  int const all = owner_totals(exchange.shape, plan.plan, exchange.rank).rows;
  int const worker = static_cast<int>(blockIdx.x) * kCommunicationWarps + warp;
  write_rows(exchange, plan, pass.epoch, saved.tables, held_rows(saved, all),
             worker * arch::kWarpThreads + arch::lane_idx(),
             static_cast<int>(gridDim.x) * kCommunicationWarps * arch::kWarpThreads);
}

// Returns where row `lane` of the warp's 16 of an up task's h goes; null: there is no such row, or it is beyond the
// limit.
template <bool kGated>
__device__ char* place_of_h(Pass const& pass, gemm::WorkTile const& tile, int first) {
  SavedPass const& saved = pass.p.saved;
  int const row_of_tile = first + gemm::kWarpRows * arch::warp_in_warpgroup() + arch::lane_idx();
  if (arch::lane_idx() >= gemm::kWarpRows || row_of_tile >= tile.rows) return nullptr;
  ExpertPlan const& expert = pass.smem.plan[tile.segment];
  std::int64_t const row =
      expert.first_row + (tile.row - expert.first_block * kPlain.tile.m) + row_of_tile;
  if (saved.gmem_h == nullptr || row >= saved.capacity) return nullptr;
  std::int64_t const row_bytes = std::int64_t{kGated ? 4 : 2} * pass.shape().intermediate;
  return saved.gmem_h + row * row_bytes;
}

}  // namespace tessera::expert_parallel
