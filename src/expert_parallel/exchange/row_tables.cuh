// SPDX-License-Identifier: Apache-2.0
// Makes the tables of the rows that an owner's experts have in a pass, from the lists of all ranks: where the rows of
// an expert begin, and for each row its pair, source and score, and the next row of its token. Thread i mod threads
// writes row i. Before that a word in the host's memory is set: how many rows there are, and whether those of every
// rank are within its row limit.
#pragma once

#include "expert_parallel/exchange/route.cuh"

namespace tessera::expert_parallel {

// Holds what every CTA knows of the rows of all ranks, by the experts' numbers over all ranks.
struct PassPlan {
  CountMatrix counts;
  ExpertPlan const* plan;
  std::int32_t const* list_begin;
};

// Signals to all ranks how many rows this rank has memory for; a thread for each rank.
__device__ inline void send_row_limit(ExchangeArguments const& exchange, std::uint32_t epoch,
                                      std::int32_t row_limit, int rank) {
  if (rank >= exchange.shape.ranks) return;
  peer_of(exchange, rank)
      .signal(exchange.window.row_limit_word(parity(epoch), exchange.rank),
              CountWord{row_limit, epoch}.word());
}

// All threads of a CTA call it. False: a wait has failed.
__device__ inline bool signal_host(ExchangeArguments const& exchange, PassPlan const& pass,
                                   std::uint32_t epoch, HostSignal const& host) {
  int const rank = static_cast<int>(threadIdx.x);
  bool reached = true, overflows = false;
  if (rank < exchange.shape.ranks) {
    std::int32_t row_limit = 0;
    reached = Waiter(exchange, epoch).for_row_limit(rank, row_limit);
    overflows = owner_totals(exchange.shape, pass.plan, rank).rows > row_limit;
  }
  if (!all_reached(reached)) return false;
  bool const all_fit = __syncthreads_or(overflows ? 1 : 0) == 0;
  if (rank == 0 && host.word != nullptr) {
    int const rows = owner_totals(exchange.shape, pass.plan, exchange.rank).rows;
    arch::store_relaxed_sys(host.word, RoutedWord{rows, all_fit, host.ticket}.word());
  }
  return true;
}

// Writes where the first `rows` rows of each expert begin; threads share the experts.
__device__ inline void write_offsets(ExchangeArguments const& exchange, PassPlan const& pass,
                                     RowTables const& made, int rows, int thread, int threads) {
  int const local = exchange.local_experts;
  for (int l = thread; l <= local; l += threads) {
    int const first = l < local ? pass.plan[exchange.rank * local + l].first_row : rows;
    made.gmem_expert_offsets[l] = min(first, rows);
  }
}

// Returns the row of the token's next choice on this owner, by expert, then choice, or -1.
__device__ inline std::int32_t next_row(ExchangeArguments const& exchange, PassPlan const& pass,
                                        std::uint32_t epoch, PoolRow const& row, std::uint32_t pair,
                                        std::uint32_t choices) {
  int const top_k = exchange.shape.max_top_k;
  int const first = exchange.rank * exchange.local_experts;
  std::uint32_t const of_token = static_cast<std::uint32_t>(exchange.token_of(pair) * top_k);
  auto const key = [&](int expert, int choice) { return expert * kMaxChoices + choice; };
  int const own = key(row.expert - first, static_cast<int>(pair - of_token));
  int least = key(exchange.local_experts, 0);
  PairPlace next = {};
  for (int j = 0; j < top_k; ++j) {
    if ((choices >> j & 1) == 0) continue;
    std::int64_t const at =
        exchange.window.placed_pair(parity(epoch), row.source, of_token + static_cast<unsigned>(j));
    PairPlace const place = PairPlace::of(__ldcg(own_window(exchange).word(at)));
    int const of_choice = key(place.expert, j);
    if (of_choice <= own || of_choice >= least) continue;
    least = of_choice;
    next = place;
  }
  if (least == key(exchange.local_experts, 0)) return -1;
  int const expert = first + next.expert;
  return pass.plan[expert].first_row +
         rows_ahead(exchange.shape, pass.counts, expert, exchange.rank, row.source) + next.index;
}

// Writes one thread's share, of `threads`, of the first `rows` rows. The lists have come.
__device__ inline void write_rows(ExchangeArguments const& exchange, PassPlan const& pass,
                                  std::uint32_t epoch, RowTables const& made, int rows, int thread,
                                  int threads) {
  RowCursor cursor(exchange.shape, pass.counts, pass.plan, pass.list_begin, exchange.rank);
  bool const once = exchange.shape.rows_cross_once();
  for (int row = thread; row < rows; row += threads) {
    PoolRow const from = cursor.at(row);
    auto const* const entry = reinterpret_cast<uint4 const*>(own_window(exchange).place(
        exchange.window.list_entry(parity(epoch), from.source, from.entry)));
    uint4 const words = __ldcg(entry);  // RouteEntry
    std::int32_t const next = once ? next_row(exchange, pass, epoch, from, words.x, words.y) : -1;
    bool const is_first = !once || words.z % 256 == 0;  // RouteEntry::place
    *reinterpret_cast<uint4*>(made.gmem_origins + row) =
        make_uint4(words.x, static_cast<std::uint32_t>(from.source),
                   static_cast<std::uint32_t>(next), is_first ? 1u : 0u);
    made.gmem_scores[row] = __uint_as_float(words.w);
  }
}

}  // namespace tessera::expert_parallel
