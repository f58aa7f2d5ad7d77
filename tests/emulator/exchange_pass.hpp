// SPDX-License-Identifier: Apache-2.0
// One pass of route, dispatch and combine: what each rank gives, gets, and should get.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "expert_parallel/exchange/exchange.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/expert_parallel/exchange.hpp"

namespace tessera::expert_parallel::unfused {

using emulator::Bits;
using emulator::Memory;

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 40;
constexpr int kNoPair = 0x77;  // bytes of slot_of_pair before a pass, where -1 means something

// What an owner's tables should say.
struct Rows {
  std::vector<std::int32_t> offsets = {0};
  std::vector<RowOrigin> origins;
};

// Rows of one token follow each other.
inline void link(Rows& rows, std::int32_t top_k) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> last;  // of a source's token
  for (std::int32_t row = 0; row < static_cast<std::int32_t>(rows.origins.size()); ++row) {
    RowOrigin& origin = rows.origins[static_cast<std::size_t>(row)];
    auto const [before, is_first] = last.try_emplace({origin.source, origin.pair / top_k}, row);
    origin.is_first = is_first ? 1 : 0;
    if (is_first) continue;
    rows.origins[static_cast<std::size_t>(before->second)].next = row;
    before->second = row;
  }
}

// Expert by expert, of each source, the owner first, tokens ascending.
inline Rows wanted_rows(Exchange const& exchange, std::int32_t owner) {
  ExchangeShape const& s = exchange.shape;
  Rows rows;
  for (std::int32_t local = 0; local < s.local_experts(); ++local) {
    for (std::int32_t i = 0; i < s.ranks; ++i) {
      std::int32_t const source = (owner + i) % s.ranks;
      for (std::int32_t pair = 0; pair < exchange.pairs(source); ++pair) {
        if (exchange.expert(source, pair) != owner * s.local_experts() + local) continue;
        rows.origins.push_back({pair, source, -1, 1});
      }
    }
    rows.offsets.push_back(static_cast<std::int32_t>(rows.origins.size()));
  }
  if (s.rows_cross_once()) link(rows, s.max_top_k);
  return rows;
}

struct Tables {
  Memory<std::int32_t> offsets;
  Memory<RowOrigin> origins;
  Memory<float> scores;

  explicit Tables(ExchangeShape const& s)
      : offsets(s.local_experts() + 1), origins(s.max_rows()), scores(s.max_rows()) {}
  RowTables addresses() const { return {offsets.get(), origins.get(), scores.get()}; }
};

constexpr int kPartials = 3;

struct Kind {
  bool second = false;    // two rows of each token
  bool dscores = false;   // a float back for each row
  bool partials = false;  // the sum of kPartials of them
  bool saves = false;     // tables for later passes
  bool tight = false;     // memory for the rows that there are, and no more
  bool may_overflow = false;
  bool copied = false;    // rows lie outside of the window, which dispatch copies there
  bool apart = false;     // the second rows come by a launch of their own
  bool gathered = false;  // each token once
  bool mixed = false;     // ranks with odd numbers do the other thing of both
  bool beside = false;    // where each token comes once: the peers' by a kernel of their own
  bool apart_on(int rank) const { return second && (apart != (mixed && rank % 2 == 1)); }
  bool gathered_on(int rank) const { return gathered != (mixed && rank % 2 == 1); }
  bool beside_on(int rank) const { return beside && gathered_on(rank); }
};

// What one rank has of a pass.
struct Share {
  Rows wanted;
  std::vector<float> scores;  // of its pairs
  std::int64_t capacity;
  Tables saved;
  Memory<Bits> x, second_x, x_with_gaps, rows, second_rows, sent, o;
  Memory<float> row_dscores, ds_partials, dscores;
  Memory<std::int32_t> slot_of_pair, routing, zeroed;  // but for its last word
  Memory<std::int32_t> ready_blocks;
  Memory<std::uint32_t> arrivals;
  std::uint64_t host_rows = 0;

  Share(Exchange const& exchange, int rank)
      : wanted(wanted_rows(exchange, rank)),
        capacity(exchange.shape.max_rows()),
        saved(exchange.shape),
        x(exchange.shape.max_tokens * std::int64_t{exchange.shape.hidden}),
        second_x(static_cast<std::int64_t>(x.size())),
        x_with_gaps(exchange.shape.max_tokens * pitch(exchange.shape)),
        rows(capacity *
             exchange.shape.hidden),  // of max_tokens * K of each rank: enough for tokens
        second_rows(capacity * exchange.shape.hidden),
        sent(capacity * exchange.shape.hidden),
        o(static_cast<std::int64_t>(x.size())),
        row_dscores(capacity),
        ds_partials(kPartials * capacity),
        dscores(std::int64_t{exchange.shape.max_tokens} * exchange.shape.max_top_k),
        slot_of_pair(static_cast<std::int64_t>(dscores.size()), kNoPair),
        routing(exchange.shape.local_experts() + 1 + 4 * capacity, kNoPair),
        zeroed(9, kNoPair),
        ready_blocks(exchange.shape.local_experts(), kNoPair),
        arrivals(1, kNoPair) {}
  // Elements from row to row of x where dispatch copies it.
  static std::int64_t pitch(ExchangeShape const& shape) { return shape.hidden + 24; }
  // Those within the row limit.
  std::int64_t held() const {
    return std::min(static_cast<std::int64_t>(wanted.origins.size()), capacity);
  }
};

struct Pass {
  Exchange exchange;
  Kind kind;
  Pass const* of;  // whose tables it takes; null: it routes
  std::uint32_t epoch;
  std::vector<std::unique_ptr<Share>> shares;
};

}  // namespace tessera::expert_parallel::unfused
