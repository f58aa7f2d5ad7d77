// SPDX-License-Identifier: Apache-2.0
// The role of a communication warp: rows from their sources into the pool; and what CTAs bring before their tasks.
#include <algorithm>

#include "tests/dist/passes.hpp"
#include "tests/dist/passes_values.hpp"

namespace tessera::dist::model {

// Rows in the order of the tasks: this warp's share, or a few at a time, drawn before the ones at hand are pulled.
Program Passes::pull_all(Actor& self, std::int32_t number, std::uint32_t epoch,
                         Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const all = owner_totals(shape_, known.plan.data(), self.rank).rows;
  std::int32_t const warps = options_.ctas * options_.communication_warps;
  std::int32_t const at_a_time = std::max(options_.rows_of_draw, 1);
  std::int32_t const taken = breaks(Break::first_rows_by_both) ? 0 : first_rows(self.rank, known);
  std::int32_t const begin = once() ? taken : 0;
  std::int32_t const own = once() ? 0 : taken;
  Spread spread;
  for (std::int32_t first = begin + number * at_a_time; first < all;) {
    std::int32_t next = first + warps;
    if (options_.rows_of_draw > 0) {
      auto const drawn = static_cast<std::int32_t>(
          co_await self.ask({.kind = Kind::count_relaxed,
                             .address = local(self, local_.row_draws(bank_of(epoch))),
                             .value = 1}));
      next = begin + (drawn + (breaks(Break::draws_begin_with_the_first) ? 0 : warps)) * at_a_time;
    }
    for (std::int32_t i = first; i < std::min(first + at_a_time, all); ++i) {
      PoolRow const row = rows.at(i);
      if (i < own && row.source == self.rank) continue;  // a CTA's
      co_await await_place(self, epoch, row.block, spread);
      co_await pull(self, epoch, row, known, spread);
      if (breaks(Break::row_pulled_twice) && i == 0) co_await pull(self, epoch, row, known, spread);
      if (static_cast<std::int32_t>(spread.untold.size()) >= options_.rows_in_flight) {
        co_await tell(self, spread);
      }
    }
    first = next;
  }
  co_await tell(self, spread);
}

// Into the next place of the ring, when the stores from there have read it.
Program Passes::load(Actor& self, std::uint64_t x, Spread& spread) {
  if (options_.rows_by_stores) co_return;  // a register
  ++spread.loaded;
  if (!breaks(Break::chunk_loaded_before_read)) co_await self.wait_read();
  co_await self.write(ring_place(self, spread), x);
}

// A row that has been loaded to a place of the pool.
Program Passes::store(Actor& self, std::uint64_t x, Address to, Spread const& spread) {
  if (options_.rows_by_stores) {
    co_await self.write(to, x);
  } else {
    co_await self.copy(ring_place(self, spread), to);
  }
}

// Once, at most half of all. Not where rows wait for places in a ring, or are copied from others.
std::int32_t Passes::first_rows(std::int32_t rank, Known const& known) const {
  if (dedup() || options_.ring_blocks > 0) return 0;
  std::int32_t const all = owner_totals(shape_, known.plan.data(), rank).rows;
  return std::min(options_.first_rows, once() ? all / 2 : all);
}

// Row i by CTA i mod CTAs.
Program Passes::bring_first_rows(Actor& self, std::int32_t index, std::uint32_t epoch,
                                 Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const end = first_rows(self.rank, known);
  for (std::int32_t s = 0; s < shape_.ranks; ++s) co_await wait_lists(self, epoch, s);
  for (std::int32_t i = index; i < end; i += options_.ctas) {
    PoolRow const row = rows.at(i);
    Entry const entry = Entry::from(co_await self.read(
        window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
    if (entry.place != 0) continue;
    std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
    std::uint64_t const x = co_await self.read(window(row.source, window_.x_row(token)));
    std::vector<Address> arrived;
    for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
      if ((entry.first_index >> k & 1) == 0) continue;
      Placed placed = {};
      co_await find_place(self, epoch, row.source, token * shape_.max_top_k + k, known, placed);
      co_await self.write(pool(self, placed.block, placed.position), x);
      co_await write_pads(self, placed.block, placed.position, placed.pad);
      arrived.push_back(local(self, local_.arrived(bank_of(epoch), placed.block)));
    }
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
    for (Address const word : arrived) co_await self.count(word, 1);
  }
}

// Of the first rows the rank's own, in turn. Its list alone has been awaited.
Program Passes::bring_own_rows(Actor& self, std::int32_t index, std::uint32_t epoch,
                               Known const& known) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const end = first_rows(self.rank, known);
  std::int32_t number = 0;
  for (std::int32_t i = 0; i < end; ++i) {
    PoolRow const row = rows.at(i);
    if (row.source != self.rank || number++ % options_.ctas != index) continue;
    Entry const entry = Entry::from(co_await self.read(
        window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
    note(pulled_, epoch, row.source, entry.pair, 0, "pulled");
    std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
    std::uint64_t const x = co_await self.read(window(row.source, window_.x_row(token)));
    std::int64_t const pool_row = std::int64_t{row.block} * shape_.block_rows + row.position;
    co_await self.write(local(self, local_.row_origin + 8 * pool_row),
                        static_cast<std::uint64_t>(row.source) << 32 | entry.pair);
    co_await self.write(pool(self, row.block, row.position), x);
    co_await write_pads(self, row.block, row.position, row.pad);
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
    co_await self.count(local(self, local_.arrived(bank_of(epoch), row.block)), 1);
  }
}

// Where a pair's row goes, noted as pulled.
Program Passes::find_place(Actor& self, std::uint32_t epoch, std::int32_t source, std::int64_t pair,
                           Known const& known, Placed& placed) {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  note(pulled_, epoch, source, static_cast<std::uint32_t>(pair), 0, "pulled");
  PairPlace const place = PairPlace::of(static_cast<std::uint32_t>(
      co_await self.read(window(self.rank, window_.place_word(parity_of(epoch), source, pair)))));
  std::int32_t const expert = self.rank * shape_.local_experts() + place.expert;
  ExpertPlan const& plan = known.plan[static_cast<std::size_t>(expert)];
  std::int32_t const in_expert = rows_ahead(shape_, counts, expert, source) + place.index;
  std::int32_t const position = in_expert % shape_.block_rows;
  placed = {plan.first_block + in_expert / shape_.block_rows, position,
            in_expert + 1 == plan.rows ? shape_.block_rows - 1 - position : 0};
  std::int64_t const pool_row = std::int64_t{placed.block} * shape_.block_rows + position;
  co_await self.write(local(self, local_.row_origin + 8 * pool_row),
                      static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint64_t>(pair));
}

// A token's row to the places of all its pairs here.
Program Passes::bring(Actor& self, std::uint32_t epoch, std::int32_t source, Entry const& entry,
                      Known const& known, Spread& spread) {
  std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
  std::uint64_t const x = co_await self.read(window(source, window_.x_row(token)), pulls_by());
  co_await load(self, x, spread);
  for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
    if ((entry.first_index >> k & 1) == 0) continue;
    std::int64_t const pair = token * shape_.max_top_k + k;
    if (breaks(Break::row_to_its_first_place_only) && pair != entry.pair) continue;
    Placed placed = {};
    co_await find_place(self, epoch, source, pair, known, placed);
    co_await store(self, x, pool(self, placed.block, placed.position), spread);
    co_await write_pads(self, placed.block, placed.position, placed.pad);
    spread.untold.push_back(local(self, local_.arrived(bank_of(epoch), placed.block)));
  }
}

Program Passes::write_pads(Actor& self, std::int32_t block, std::int32_t position,
                           std::int32_t pad) {
  for (std::int32_t p = 1; p <= pad; ++p)
    co_await self.write(pool(self, block, position + p), kPad);
  if (pad > 0 && !breaks(Break::pad_written_without_proxy_fence)) co_await self.proxy_fence();
}

// Rows that have been written: counted, and waited for before that.
Program Passes::tell(Actor& self, Spread& spread) {
  if (spread.untold.empty()) co_return;
  if (options_.rows_by_stores) {
    if (!breaks(Break::stored_rows_without_proxy_fence)) co_await self.proxy_fence();
  } else if (breaks(Break::arrived_before_written)) {
    co_await self.wait_read();
  } else {
    co_await self.wait_written();
  }
  for (Address const word : spread.untold) {
    if (breaks(Break::arrived_relaxed)) {
      co_await self.ask({.kind = Kind::count_relaxed, .address = word, .value = 1});
    } else {
      co_await self.count(word, 1);
    }
  }
  spread.untold.clear();
}

// In a ring: until all ups of the block that lies there have read it. They have lower tickets than those of `block`,
// as a ring has places for a unit, and need no row of it or of later blocks; but they may need what this warp has not
// told.
Program Passes::await_place(Actor& self, std::uint32_t epoch, std::int32_t block, Spread& spread) {
  std::int32_t const before = block - options_.ring_blocks;
  if (options_.ring_blocks == 0 || before < 0 || breaks(Break::ring_without_waiting)) co_return;
  Address const word = local(self, local_.a_ready(bank_of(epoch), before));
  auto const ups = static_cast<std::uint64_t>(shape_.up_tiles());
  std::uint64_t const free = co_await self.look(word, ups);
  if (free == 0 && !breaks(Break::untold_rows_while_waiting)) co_await tell(self, spread);
  if (breaks(Break::ring_waits_for_one_up)) {
    co_await self.ask({.kind = Kind::wait,
                       .address = word,
                       .value = 1,
                       .until = Until::at_least_epoch,
                       .site = Site::a_ready});
  } else {
    co_await self.wait_count(word, ups, Site::a_ready);
  }
  co_await self.proxy_fence();
}

Program Passes::pull(Actor& self, std::uint32_t epoch, PoolRow const& row, Known const& known,
                     Spread& spread) {
  Entry const entry = Entry::from(co_await self.read(
      window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
  if (once()) {
    if (entry.place == 0 || breaks(Break::every_row_brings)) {
      co_await bring(self, epoch, row.source, entry, known, spread);
    }
    co_return;
  }
  std::int64_t const token = entry.pair / static_cast<std::uint32_t>(shape_.max_top_k);
  std::int64_t const pool_row = std::int64_t{row.block} * shape_.block_rows + row.position;
  std::uint64_t x = 0;
  if (entry.place == 0) {
    note(pulled_, epoch, row.source, entry.pair, 0, "pulled");
    x = co_await self.read(window(row.source, window_.x_row(token)), pulls_by());
  } else {  // the group's first row is here already, or on its way: in an earlier block
    CountMatrix const counts{known.counts.data(), shape_.experts};
    std::int32_t const expert =
        self.rank * shape_.local_experts() + static_cast<std::int32_t>(entry.first_expert);
    std::int64_t const first =
        pool_row_of_pair(shape_, counts, known.plan.data(), expert, row.source,
                         static_cast<std::int32_t>(entry.first_index));
    auto const block = static_cast<std::int32_t>(first / shape_.block_rows);
    if (!breaks(Break::untold_rows_while_waiting)) co_await tell(self, spread);
    if (!breaks(Break::copy_without_arrived)) {
      co_await self.wait_count(local(self, local_.arrived(bank_of(epoch), block)),
                               static_cast<std::uint64_t>(rows_of_block(
                                   known.plan[static_cast<std::size_t>(expert)], block)),
                               Site::arrived);
    }
    co_await self.proxy_fence();
    x = co_await self.read({self.rank, Space::x_pool, first}, pulls_by());
  }
  co_await load(self, x, spread);
  co_await store(self, x, pool(self, row.block, row.position), spread);
  co_await self.write(local(self, local_.row_origin + 8 * pool_row),
                      static_cast<std::uint64_t>(row.source) << 32 | entry.pair);
  if (dedup()) {
    co_await self.write(
        local(self, local_.group_row(row.source, token, static_cast<std::int32_t>(entry.place))),
        static_cast<std::uint64_t>(pool_row));
  }
  co_await write_pads(self, row.block, row.position, row.pad);
  spread.untold.push_back(local(self, local_.arrived(bank_of(epoch), row.block)));
}

}  // namespace tessera::dist::model
