// SPDX-License-Identifier: Apache-2.0
// route: from this rank's choices to tables of the rows that its own experts have to multiply.
//   room          rows that this rank has memory for, to all ranks
//   route, plan   route.cuh
//   host          how many rows there are, and whether every rank has room for its own
//   tables        offsets, and for each row its pair, source and score, and the next row of its token, row i by thread
//                 i mod threads
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   generic writes to peers: a CTA's are released when it counts, the last one fences at system scope for all,
//          then publishes
// Requires shape.experts <= kMostExperts, all CTAs resident (cooperative launch)
#include "cuda/arch/dynamic_shared.cuh"
#include "dist/kernels/exchange.hpp"
#include "dist/kernels/route.cuh"

namespace tessera::dist {
namespace {

constexpr int kThreads = 256;

using Storage = RouteStorage<kThreads>;

__device__ void write_offsets(RouteArguments const& p, Storage const& smem, int rows) {
  ExchangeArguments const& exchange = p.exchange;
  int const local = exchange.local_experts;
  for (int l = static_cast<int>(threadIdx.x); l <= local; l += kThreads) {
    p.made.gmem_expert_offsets[l] =
        l < local ? smem.plan[exchange.rank * local + l].first_row : rows;
  }
}

// Behind publish. By all threads of a CTA.
__device__ void tell_host(RouteArguments const& p, Storage const& smem, std::uint32_t epoch,
                          int rows) {
  ExchangeArguments const& exchange = p.exchange;
  int const rank = static_cast<int>(threadIdx.x);
  bool overflows = false;
  if (rank < exchange.shape.ranks) {
    std::uint32_t const room = __ldcg(
        word_of(exchange.windows[exchange.rank], exchange.window.room_word(parity(epoch), rank)));
    int const of_rank = owner_totals(exchange.shape, smem.plan, rank).rows;
    overflows = static_cast<std::uint32_t>(of_rank) > room;
  }
  bool const all_fit = __syncthreads_or(overflows ? 1 : 0) == 0;
  if (rank == 0 && p.host_rows != nullptr) {
    arch::store_relaxed_sys(p.host_rows, RoutedWord{rows, all_fit, p.ticket}.word());
  }
}

// The row of the token's next choice on this owner, by expert, then choice; -1: there is none.
__device__ std::int32_t next_row(RouteArguments const& p, Storage const& smem, std::uint32_t epoch,
                                 PoolRow const& row, std::uint32_t pair, std::uint32_t choices) {
  ExchangeArguments const& exchange = p.exchange;
  int const top_k = exchange.shape.max_top_k;
  int const first = exchange.rank * exchange.local_experts;
  std::uint32_t const of_token = static_cast<std::uint32_t>(exchange.token_of(pair) * top_k);
  auto const key = [&](int expert, int choice) { return expert * kMostChoices + choice; };
  int const own = key(row.expert - first, static_cast<int>(pair - of_token));
  int least = key(exchange.local_experts, 0);
  PairPlace next = {};
  for (int j = 0; j < top_k; ++j) {
    if ((choices >> j & 1) == 0) continue;
    std::int64_t const at =
        exchange.window.placed_pair(parity(epoch), row.source, of_token + static_cast<unsigned>(j));
    PairPlace const place = PairPlace::of(__ldcg(word_of(exchange.windows[exchange.rank], at)));
    int const of_choice = key(place.expert, j);
    if (of_choice <= own || of_choice >= least) continue;
    least = of_choice;
    next = place;
  }
  if (least == key(exchange.local_experts, 0)) return -1;
  int const expert = first + next.expert;
  return smem.plan[expert].first_row +
         rows_ahead(exchange.shape, {smem.counts, exchange.shape.experts}, expert, exchange.rank,
                    row.source) +
         next.index;
}

__device__ void write_rows(RouteArguments const& p, Storage const& smem, std::uint32_t epoch,
                           int rows) {
  ExchangeArguments const& exchange = p.exchange;
  RowCursor cursor(exchange.shape, {smem.counts, exchange.shape.experts}, smem.plan,
                   smem.list_begin, exchange.rank);
  int const threads = static_cast<int>(gridDim.x) * kThreads;
  for (int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       row < rows; row += threads) {
    PoolRow const from = cursor.at(row);
    auto const* const entry = reinterpret_cast<uint4 const*>(
        exchange.windows[exchange.rank] +
        exchange.window.list_entry(parity(epoch), from.source, from.entry));
    uint4 const words = __ldcg(entry);  // RouteEntry
    bool const once = exchange.shape.rows_cross_once();
    std::int32_t const next = once ? next_row(p, smem, epoch, from, words.x, words.y) : -1;
    bool const is_first = !once || words.z % 256 == 0;  // RouteEntry::place
    *reinterpret_cast<uint4*>(p.made.gmem_origins + row) =
        make_uint4(words.x, static_cast<std::uint32_t>(from.source),
                   static_cast<std::uint32_t>(next), is_first ? 1u : 0u);
    p.made.gmem_scores[row] = __uint_as_float(words.w);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    route_rows(__grid_constant__ RouteArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Storage*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread < exchange.shape.ranks) {  // ahead of what publish says
    *word_of(exchange.windows[thread], exchange.window.room_word(parity(epoch), exchange.rank)) =
        p.room;
  }
  if (!route<true>(exchange, smem, epoch, NothingBeside(), [] {})) return;
  int const rows = owner_totals(exchange.shape, smem.plan, exchange.rank).rows;
  if (blockIdx.x == 0) write_offsets(p, smem, rows);
  bool reached = true;
  if (thread < exchange.shape.ranks) {
    reached = Waiter(exchange, epoch)
                  .for_epoch(exchange.window.publish_word(thread), epoch, Site::publish, thread);
  }
  if (!all_reached(reached)) return;
  if (blockIdx.x == 0) tell_host(p, smem, epoch, rows);
  write_rows(p, smem, epoch, rows);
}

}  // namespace

cudaError_t launch_route(RouteArguments const& args, int sm_count, cudaStream_t stream) {
  ExchangeShape const& shape = args.exchange.shape;
  if (shape.experts > kMostExperts || shape.ranks > kMaxRanks) return cudaErrorInvalidValue;
  cudaError_t const error = cudaFuncSetAttribute(
      route_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Storage)));
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<RouteArguments*>(&args)};
  return cudaLaunchCooperativeKernel(route_rows, dim3(static_cast<unsigned>(sm_count)),
                                     dim3(kThreads), arguments, sizeof(Storage), stream);
}

}  // namespace tessera::dist
