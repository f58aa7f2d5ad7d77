// SPDX-License-Identifier: Apache-2.0
// The role of a communication warp: rows from their sources into the pool; and what CTAs pull before their tasks.
#include <algorithm>
#include <iterator>

#include "tests/expert_parallel/passes.hpp"
#include "tests/expert_parallel/passes_values.hpp"

namespace tessera::expert_parallel::model {

// Rows in the order of the tasks: this warp's share, or a few at a time, drawn before the ones at hand are pulled.
Program Passes::pull_all(Actor& self, std::int32_t number, std::uint32_t epoch,
                         Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const all = owner_totals(shape_, known.plan.data(), self.rank).rows;
  std::int32_t const warps = options_.ctas * options_.communication_warps;
  std::int32_t const at_a_time = std::max(options_.rows_of_draw, 1);
  std::int32_t const taken =
      breaks(Break::prologue_rows_by_both) ? 0 : prologue_rows(self.rank, known);
  std::int32_t const begin = once() ? taken : 0;
  std::int32_t const own = once() ? 0 : taken;
  Spread spread;
  for (std::int32_t first = begin + number * at_a_time; first < all;) {
    std::int32_t next = first + warps;
    if (options_.rows_of_draw > 0) {
      co_await draw(self, local_.row_draws(bank_of(epoch)),
                    breaks(Break::draws_begin_with_the_first), next);
      next = begin + next * at_a_time;
    }
    for (std::int32_t i = first; i < std::min(first + at_a_time, all); ++i) {
      PoolRow const row = rows.at(i);
      if (i < own && row.source == self.rank) continue;  // a CTA's
      co_await await_place(self, epoch, row.block, spread);
      co_await pull(self, epoch, row, known, spread);
      if (breaks(Break::row_pulled_twice) && i == 0) co_await pull(self, epoch, row, known, spread);
      if (static_cast<std::int32_t>(spread.unannounced.size()) >= options_.rows_in_flight) {
        co_await announce(self, spread);
      }
    }
    first = next;
  }
  co_await announce(self, spread);
}

// The number of a draw. Every communication warp has had one, its own, without the counter.
Program Passes::draw(Actor& self, std::int64_t draws, bool with_the_first, std::int32_t& number) {
  std::uint64_t const drawn = co_await self.count_relaxed(local(self, draws), 1);
  number = static_cast<std::int32_t>(drawn) +
           (with_the_first ? 0 : options_.ctas * options_.communication_warps);
}

// Into the next place of the ring, when the stores from there have read it.
Program Passes::load(Actor& self, std::uint64_t x, Spread& spread) {
  if (options_.rows_by_stores) co_return;  // a register
  ++spread.loaded;
  if (!breaks(Break::chunk_loaded_before_read)) co_await self.wait_read();
  co_await self.write(ring_place(self, spread), x);
}

// A row that has been loaded to a place of the pool.
Program Passes::store(Actor& self, std::uint64_t x, Placed const& to, Spread const& spread) {
  for (std::int32_t part = 0; part < parts(); ++part) {
    Address const cell = pool(self, to.block, to.position, part);
    if (options_.rows_by_stores) {
      co_await self.write(cell, x);
    } else {
      co_await self.copy(ring_place(self, spread), cell);
    }
  }
}

// Once, at most half of all. Not where rows wait for places in a ring.
std::int32_t Passes::prologue_rows(std::int32_t rank, Known const& known) const {
  if (options_.ring_blocks > 0) return 0;
  std::int32_t const all = owner_totals(shape_, known.plan.data(), rank).rows;
  return std::min(options_.prologue_rows, once() ? all / 2 : all);
}

// Row i by CTA i mod CTAs.
Program Passes::pull_prologue_rows(Actor& self, std::int32_t index, std::uint32_t epoch,
                                   Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const end = prologue_rows(self.rank, known);
  for (std::int32_t s = 0; s < shape_.ranks; ++s) co_await wait_lists(self, epoch, s);
  for (std::int32_t i = index; i < end; i += options_.ctas) {
    PoolRow const row = rows.at(i);
    Entry const entry = Entry::from(co_await self.read(
        window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
    if (entry.place != 0) continue;
    std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
    std::uint64_t const x = co_await self.read(x_of(self, row.source, token));
    std::vector<Term> terms;
    co_await read_terms(self, epoch, row.source, entry, terms);
    bool const adds = !added_terms(self.rank, row.source, terms).empty();
    std::vector<Address> arrived;
    for (Term const& term : terms) {
      Placed placed = {};
      co_await place_row(self, epoch, row.source, term, adds && is_added(term), known, placed);
      for (std::int32_t part = 0; part < parts(); ++part) {
        co_await self.write(pool(self, placed.block, placed.position, part), x);
      }
      co_await write_pads(self, placed.block, placed.position, placed.pad);
      arrived.push_back(local(self, local_.arrived(bank_of(epoch), placed.block)));
    }
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
    for (Address const word : arrived) co_await self.count(word, 1);
  }
}

// Of the prologue rows the rank's own, in turn. Its list alone has been awaited.
Program Passes::copy_own_rows(Actor& self, std::int32_t index, std::uint32_t epoch,
                              Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const end = prologue_rows(self.rank, known);
  std::int32_t number = 0;
  for (std::int32_t i = 0; i < end; ++i) {
    PoolRow const row = rows.at(i);
    if (row.source != self.rank || number++ % options_.ctas != index) continue;
    Entry const entry = Entry::from(co_await self.read(
        window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
    note(pulled_, epoch, row.source, entry.pair, 0, "pulled");
    std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
    std::uint64_t const x = co_await self.read(x_of(self, row.source, token));
    std::int64_t const pool_row = std::int64_t{row.block} * shape_.block_rows + row.position;
    co_await self.write(local(self, local_.row_origin + 8 * pool_row),
                        static_cast<std::uint64_t>(row.source) << 32 | entry.pair);
    co_await self.write(pool(self, row.block, row.position, 0), x);
    co_await write_pads(self, row.block, row.position, row.pad);
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
    co_await self.count(local(self, local_.arrived(bank_of(epoch), row.block)), 1);
  }
}

// All pairs of an entry's token on this rank, in the order of the choices.
Program Passes::read_terms(Actor& self, std::uint32_t epoch, std::int32_t source,
                           Entry const& entry, std::vector<Term>& terms) {
  std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
  for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
    if ((entry.choices >> k & 1) == 0) continue;
    std::int64_t const pair = token * shape_.max_top_k + k;
    std::uint64_t const word =
        co_await self.read(window(self.rank, window_.placed_pair(parity_of(epoch), source, pair)));
    terms.push_back({pair, PairPlace::of(static_cast<std::uint32_t>(word))});
  }
}

// Those whose results are added up here; none, if there is one alone.
std::vector<Passes::Term> Passes::added_terms(std::int32_t rank, std::int32_t source,
                                              std::vector<Term> const& terms) const {
  std::vector<Term> added;
  if (source == rank) return added;
  std::copy_if(terms.begin(), terms.end(), std::back_inserter(added),
               [&](Term const& term) { return is_added(term); });
  if (added.size() < 2) added.clear();
  return added;
}

// Of this rank's pool, pads counted.
std::int64_t Passes::pool_row(Actor const& self, std::int32_t source, Term const& term,
                              Known const& known) const {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  std::int32_t const expert = self.rank * shape_.local_experts() + term.place.expert;
  return pool_row_of_pair(shape_, counts, known.plan.data(), expert, source, term.place.index);
}

// Where a pair's row goes, noted as pulled; and what is kept of it for its result.
Program Passes::place_row(Actor& self, std::uint32_t epoch, std::int32_t source, Term const& term,
                          bool stays, Known const& known, Placed& placed) {
  note(pulled_, epoch, source, term.pair, 0, "pulled");
  std::int32_t const expert = self.rank * shape_.local_experts() + term.place.expert;
  ExpertPlan const& plan = known.plan[static_cast<std::size_t>(expert)];
  std::int64_t const row = pool_row(self, source, term, known);
  auto const block = static_cast<std::int32_t>(row / shape_.block_rows);
  auto const position = static_cast<std::int32_t>(row % shape_.block_rows);
  bool const is_last = row + 1 == std::int64_t{plan.first_block} * shape_.block_rows + plan.rows;
  placed = {block, position, is_last ? shape_.block_rows - 1 - position : 0};
  std::uint64_t const to = stays ? kStays : static_cast<std::uint64_t>(source);
  co_await self.write(local(self, local_.row_origin + 8 * row),
                      to << 32 | static_cast<std::uint64_t>(term.pair));
}

// A token's row to the places of all its pairs here.
Program Passes::pull(Actor& self, std::uint32_t epoch, std::int32_t source, Entry const& entry,
                     Known const& known, Spread& spread) {
  std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
  std::uint64_t const x = co_await self.read(x_of(self, source, token), pulls_by());
  std::vector<Term> terms;
  co_await read_terms(self, epoch, source, entry, terms);
  bool const adds = !added_terms(self.rank, source, terms).empty();
  co_await load(self, x, spread);
  for (Term const& term : terms) {
    if (breaks(Break::row_to_its_first_place_only) && term.pair != entry.pair) continue;
    Placed placed = {};
    co_await place_row(self, epoch, source, term, adds && is_added(term), known, placed);
    co_await store(self, x, placed, spread);
    co_await write_pads(self, placed.block, placed.position, placed.pad);
    spread.unannounced.push_back(local(self, local_.arrived(bank_of(epoch), placed.block)));
  }
}

Program Passes::write_pads(Actor& self, std::int32_t block, std::int32_t position,
                           std::int32_t pad) {
  for (std::int32_t p = 1; p <= pad; ++p) {
    for (std::int32_t part = 0; part < parts(); ++part) {
      co_await self.write(pool(self, block, position + p, part), kPad);
    }
  }
  if (pad > 0 && !breaks(Break::pad_written_without_proxy_fence)) co_await self.proxy_fence();
}

// Rows that have been written: counted, and waited for before that.
Program Passes::announce(Actor& self, Spread& spread) {
  if (spread.unannounced.empty()) co_return;
  if (options_.rows_by_stores) {
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
  } else if (breaks(Break::arrived_before_written)) {
    co_await self.wait_read();
  } else {
    co_await self.wait_written();
  }
  for (Address const word : spread.unannounced) {
    if (breaks(Break::arrived_relaxed)) {
      co_await self.ask({.kind = Kind::count_relaxed, .address = word, .value = 1});
    } else {
      co_await self.count(word, 1);
    }
  }
  spread.unannounced.clear();
}

// In a ring: until all up tasks of the block that lies there have read it. They have lower tickets than those of
// `block`, as a ring has places for a unit, and need no row of it or of later blocks; but they may need what this warp
// has not announced.
Program Passes::await_place(Actor& self, std::uint32_t epoch, std::int32_t block, Spread& spread) {
  std::int32_t const before = block - options_.ring_blocks;
  if (options_.ring_blocks == 0 || before < 0 || breaks(Break::ring_without_waiting)) co_return;
  Address const word = local(self, local_.a_ready(bank_of(epoch), before));
  auto const up_tasks = static_cast<std::uint64_t>(shape_.up_tiles());
  std::uint64_t const free = co_await self.look(word, up_tasks);
  if (free == 0 && !breaks(Break::unannounced_rows_while_waiting)) co_await announce(self, spread);
  if (breaks(Break::ring_waits_for_one_up)) {
    co_await self.ask({.kind = Kind::wait,
                       .address = word,
                       .value = 1,
                       .until = Until::at_least_epoch,
                       .site = Site::a_ready});
  } else {
    co_await self.wait_count(word, up_tasks, Site::a_ready);
  }
  co_await self.proxy_fence();
}

Program Passes::pull(Actor& self, std::uint32_t epoch, PoolRow const& row, Known const& known,
                     Spread& spread) {
  Entry const entry = Entry::from(co_await self.read(
      window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
  if (once()) {
    if (entry.place == 0 || breaks(Break::every_row_brings)) {
      co_await pull(self, epoch, row.source, entry, known, spread);
    }
    co_return;
  }
  std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
  std::int64_t const pool_row = std::int64_t{row.block} * shape_.block_rows + row.position;
  note(pulled_, epoch, row.source, entry.pair, 0, "pulled");
  std::uint64_t const x = co_await self.read(x_of(self, row.source, token), pulls_by());
  co_await load(self, x, spread);
  co_await store(self, x, {row.block, row.position, row.pad}, spread);
  co_await self.write(local(self, local_.row_origin + 8 * pool_row),
                      static_cast<std::uint64_t>(row.source) << 32 | entry.pair);
  co_await write_pads(self, row.block, row.position, row.pad);
  spread.unannounced.push_back(local(self, local_.arrived(bank_of(epoch), row.block)));
}

}  // namespace tessera::expert_parallel::model
