// SPDX-License-Identifier: Apache-2.0
// The communication warps of the fused kernel pull rows from their sources into the pool, in the order of the tasks
// -> arrived. Consumer warps, which have nothing to multiply yet, pull the prologue rows: what the first tasks wait
// for, or a part of it.
//   direct  pull_rows: a row for every pair, row i by warp i mod warps
//           copy_own_rows: of the prologue rows this rank's own
//   once, partial combine
//           pull_tokens: a token's row for all its pairs here, with the first of them. Rows are drawn, four at a time,
//           so a warp whose rows take long has fewer; where a row goes does not depend on who pulls it
//           pull_prologue_tokens: all prologue rows, as every one of them goes to several places
// Ahead   direct: entries are read a row before. Else a number is drawn two draws before it is needed, entries are
//         read one draw before, and the next token is found while a row is on its way
// Pads between blocks are not written: a row of a GEMM's result depends on its own row alone, and no slot gets a pad.
#pragma once

#include "expert_parallel/fused/row_copies.cuh"

namespace tessera::expert_parallel {

constexpr int kRowsOfDraw = 4;  // where rows cross once; not every one of them pulls its token

// Counts the rows of the blocks that the first tasks of all CTAs read, as if each block's tiles were all among them.
// The tasks, which take two tiles at a time, read a few blocks more.
__device__ inline int rows_of_first_tasks(ExchangeShape const& shape) {
  int const tasks = static_cast<int>(gridDim.x);
  return (tasks + shape.up_tiles() - 1) / shape.up_tiles() * shape.block_rows;
}

// Counts the prologue rows, which consumer warps pull, where rows cross once. Two GPUs: those of the first tasks, at
// most half of all rows; those of two tasks are 0.6% slower (docs/notebook/2026-11-24-two-gpus-again.md). More GPUs,
// where three of four rows or more wait for the link: one for each warp, so that early rows do not queue behind late
// ones, and at most a sixth of all (docs/notebook/2026-11-26-fewer-first-rows.md).
__device__ inline int prologue_rows(ExchangeShape const& shape, int all) {
  int const most =
      shape.ranks > 2 ? min(static_cast<int>(gridDim.x) * kConsumerWarps, all / 6) : all / 2;
  return min(rows_of_first_tasks(shape), most) / kRowsOfDraw * kRowsOfDraw;
}

// Returns a row of x in the window of its source.
__device__ inline char const* x_of(ExchangeArguments const& p, int source, std::int64_t token) {
  return peer_of(p, source).load_if_local<OtherWay::kSent>(p.window.x_row(token));
}

// Returns pool_row_of_pair of a pair that is here, where rows cross once.
__device__ inline int pool_row_of(Pass const& pass, PairPlace const& place, int source) {
  return pass.smem.pool_begin[source * pass.p.exchange.local_experts + place.expert] + place.index;
}

// Transfer::direct. Each of kCommunicationWarps warps of a CTA pulls its share of all rows but this rank's own prologue
// rows, which the consumer warps copy.
__device__ inline void pull_rows(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  int const workers = static_cast<int>(gridDim.x) * kCommunicationWarps;
  int const rows = owner_totals(p.shape, pass.plan(), p.rank).rows;
  int const first = rows_of_first_tasks(p.shape);
  pass.wait_lists();
  if (pass.failed()) return;
  RowCopies copies(pass);
  RowCursor cursor(p.shape, pass.counts(), pass.plan(), pass.smem.list_begin, p.rank);
  int number = static_cast<int>(blockIdx.x) * kCommunicationWarps + warp;
  PoolRow ahead = {};
  std::uint32_t ahead_pair = 0;
  // Entries are read a row before they are needed.
  auto const look_ahead = [&] {
    do {
      if (number >= rows) return false;
      ahead = cursor.at(number);
      number += workers;
    } while (ahead.source == p.rank && number - workers < first);
    std::int64_t const at = p.window.list_entry(parity(pass.epoch), ahead.source, ahead.entry);
    ahead_pair = __ldcg(own_window(p).word(at));  // RouteEntry::pair
    return true;
  };
  bool more = look_ahead();
  while (more) {
    int const source = ahead.source;
    int const row = ahead.row;
    std::uint32_t const pair = ahead_pair;
    more = look_ahead();
    bool const first_lane = arch::lane_idx() == 0;
    if (first_lane) *row_origin(p, row) = make_uint2(pair, static_cast<std::uint32_t>(source));
    int const token = p.token_of(pair);
    copies.copy(x_of(p, source, token), first_lane ? row : -1);
  }
  copies.finish();
}

// Lane j of a converged warp returns the row of the pool for choice j of a token, if that is one of `choices`, else -1,
// and writes down where its result goes. kPartialCombine: Transfer::partial_combine.
template <bool kPartialCombine>
__device__ int place_row(Pass const& pass, int token, int source, std::uint32_t choices,
                         PairPlace const& place) {
  ExchangeArguments const& p = pass.p.exchange;
  int const lane = arch::lane_idx();
  bool const has_row = (choices >> lane & 1) != 0;
  unsigned added = 0;
  if (kPartialCombine && source != p.rank) {
    added = __ballot_sync(arch::kAllLanes, has_row && place.expert < p.partial_experts);
  }
  if (!has_row) return -1;
  int const row = pool_row_of(pass, place, source);
  bool const stays = __popc(added) > 1 && (added >> lane & 1) != 0;
  *row_origin(p, row) = make_uint2(token * p.shape.max_top_k + lane,
                                   stays ? kStays : static_cast<std::uint32_t>(source));
  return row;
}

// Finds the tokens that one warp pulls.
class TokenDraws {
 public:
  struct Token {
    std::uint32_t choices = 0;  // on this rank; none: there are no more tokens
    int token = 0;              // on its source
    int source = 0;
    std::uint32_t place = 0;  // of lane j: PairPlace of choice j, if it is one of those; on its way
  };

  __device__ TokenDraws(Pass const& pass, int warp)
      : pass_(pass),
        p_(pass.p.exchange),
        lane_(arch::lane_idx()),
        warps_(static_cast<int>(gridDim.x) * kCommunicationWarps),
        rows_(owner_totals(p_.shape, pass.plan(), p_.rank).rows),
        begin_(prologue_rows(p_.shape, rows_)),
        cursor_(p_.shape, pass.counts(), pass.plan(), pass.smem.list_begin, p_.rank) {
    draw();
    read(static_cast<int>(blockIdx.x) * kCommunicationWarps + warp);
  }

  __device__ Token next() {
    while (left_ == 0) {
      if (first_ahead_ >= rows_) return {};
      entry_ = entry_ahead_;
      source_ = source_ahead_;
      bool const pulls = has_row() && entry_.z % 256 == 0;  // RouteEntry::place
      left_ = __ballot_sync(arch::kAllLanes, pulls);
      int const next = warps_ + static_cast<int>(__shfl_sync(arch::kAllLanes, drawn_, 0));
      draw();
      read(next);
    }
    int const from = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    std::uint32_t const pair = __shfl_sync(arch::kAllLanes, entry_.x, from);
    Token token;
    token.choices = __shfl_sync(arch::kAllLanes, entry_.y, from);
    token.token = p_.token_of(pair);
    token.source = __shfl_sync(arch::kAllLanes, source_, from);
    if ((token.choices >> lane_ & 1) != 0) {
      token.place = __ldcg(own_window(p_).word(p_.window.placed_pair(
          parity(pass_.epoch), token.source, token.token * p_.shape.max_top_k + lane_)));
    }
    return token;
  }

 private:
  // Says whether this lane has a row of the draw ahead.
  __device__ bool has_row() const { return lane_ < kRowsOfDraw && first_ahead_ + lane_ < rows_; }
  __device__ void draw() {
    if (lane_ == 0)
      drawn_ = arch::count_relaxed_gpu(pass_.local_word(p_.local.row_draws(pass_.epoch)), 1u);
  }
  // Lane j reads the entry of row j of a draw.
  __device__ void read(int draw) {
    first_ahead_ = begin_ + draw * kRowsOfDraw;
    if (!has_row()) return;
    PoolRow const row = cursor_.at(first_ahead_ + lane_);
    source_ahead_ = row.source;
    entry_ahead_ = __ldcg(reinterpret_cast<uint4 const*>(
        own_window(p_).place(p_.window.list_entry(parity(pass_.epoch), row.source, row.entry))));
  }

  Pass const& pass_;
  ExchangeArguments const& p_;
  int lane_, warps_, rows_, begin_;
  RowCursor cursor_;
  unsigned left_ = 0;  // lanes whose tokens are still to be pulled
  uint4 entry_ = {};   // RouteEntry of this lane
  int source_ = 0;
  int first_ahead_ = 0;  // the next draw's first row
  uint4 entry_ahead_ = {};
  int source_ahead_ = 0;
  std::uint32_t drawn_ = 0;  // of lane 0: the draw after the next
};

// Each of kCommunicationWarps warps of a CTA pulls the tokens that it draws, where rows cross once.
template <bool kPartialCombine>
__device__ void pull_tokens(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  pass.wait_lists();
  if (pass.failed()) return;
  RowCopies copies(pass);
  TokenDraws draws(pass, warp);
  TokenDraws::Token token = draws.next();
  while (token.choices != 0) {
    int const row = place_row<kPartialCombine>(pass, token.token, token.source, token.choices,
                                               PairPlace::of(token.place));
    copies.copy(x_of(p, token.source, token.token), row, [&] { token = draws.next(); });
  }
  copies.finish();
}

// Where rows cross once, warp i mod warps of all consumer warps pulls prologue row i; those of a CTA are far apart.
// Lane j reads the entry of the warp's j-th row.
template <bool kPartialCombine>
__device__ void pull_prologue_tokens(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  RowCopies copies(pass);
  int const lane = arch::lane_idx();
  pass.wait_lists();
  if (pass.failed()) return;
  int const warps = static_cast<int>(gridDim.x) * kConsumerWarps;
  int const end = prologue_rows(p.shape, owner_totals(p.shape, pass.plan(), p.rank).rows);
  auto const top_k = static_cast<std::uint32_t>(p.shape.max_top_k);
  RowCursor cursor(p.shape, pass.counts(), pass.plan(), pass.smem.list_begin, p.rank);
  int number = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x) + lane * warps;
  for (; __any_sync(arch::kAllLanes, number < end); number += arch::kWarpThreads * warps) {
    int source_ahead = 0;
    uint4 entry = {};  // RouteEntry
    if (number < end) {
      PoolRow const row = cursor.at(number);
      source_ahead = row.source;
      entry = __ldcg(reinterpret_cast<uint4 const*>(
          own_window(p).place(p.window.list_entry(parity(pass.epoch), row.source, row.entry))));
    }
    bool const pulls = number < end && entry.z % 256 == 0;  // RouteEntry::place
    // Lane j loads the PairPlace of choice j of the first token that is left, if it is one of its choices here.
    auto const place_of = [&](unsigned left) {
      if (left == 0) return 0u;
      int const from = __ffs(static_cast<int>(left)) - 1;
      int const source = __shfl_sync(arch::kAllLanes, source_ahead, from);
      int const token = p.token_of(__shfl_sync(arch::kAllLanes, entry.x, from));
      std::uint32_t const choices = __shfl_sync(arch::kAllLanes, entry.y, from);
      if ((choices >> lane & 1) == 0) return 0u;
      return __ldcg(own_window(p).word(
          p.window.placed_pair(parity(pass.epoch), source, token * top_k + lane)));
    };
    unsigned left = __ballot_sync(arch::kAllLanes, pulls);
    std::uint32_t ahead = place_of(left);
    for (; left != 0; left &= left - 1) {
      std::uint32_t const place = ahead;
      ahead = place_of(left & (left - 1));
      int const from = __ffs(static_cast<int>(left)) - 1;
      int const source = __shfl_sync(arch::kAllLanes, source_ahead, from);
      int const token = p.token_of(__shfl_sync(arch::kAllLanes, entry.x, from));
      std::uint32_t const choices = __shfl_sync(arch::kAllLanes, entry.y, from);
      int const row =
          place_row<kPartialCombine>(pass, token, source, choices, PairPlace::of(place));
      copies.copy(x_of(p, source, token), row);
    }
  }
  copies.finish();
}

// Transfer::direct. Warp k mod warps of all consumer warps copies number k of this rank's own prologue rows.
__device__ inline void copy_own_rows(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  RowCopies copies(pass);
  int const lane = arch::lane_idx();
  int const warps = static_cast<int>(gridDim.x) * kConsumerWarps;
  int const end = rows_of_first_tasks(p.shape);
  int const last = (p.rank + 1) * p.local_experts;
  int expert = p.rank * p.local_experts;
  int index = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  pass.wait_own_list();
  if (pass.failed()) return;
  for (;; index += warps) {
    while (expert < last && index >= pass.counts().at(p.rank, expert)) {
      index -= pass.counts().at(p.rank, expert++);
    }
    // An owner's own rows are the first of each of its experts.
    if (expert == last || pass.plan()[expert].first_row + index >= end) break;
    int const entry = pass.smem.list_begin[expert] + index;
    std::uint32_t const pair =
        __ldcg(own_window(p).word(p.window.list_entry(parity(pass.epoch), p.rank,
                                                      entry)));  // RouteEntry::pair
    int const row = pass.plan()[expert].first_block * p.shape.block_rows + index;
    if (lane == 0) *row_origin(p, row) = make_uint2(pair, static_cast<std::uint32_t>(p.rank));
    copies.copy(own_window(p).place(p.window.x_row(p.token_of(pair))), lane == 0 ? row : -1);
  }
  copies.finish();
}

}  // namespace tessera::expert_parallel
