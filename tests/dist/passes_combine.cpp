// SPDX-License-Identifier: Apache-2.0
// The roles after the last down of a token: sums of the owner, sums of the source.
#include <string>

#include "tests/dist/passes.hpp"
#include "tests/dist/passes_values.hpp"

namespace tessera::dist::model {

// The groups that end with a row of this warp.
Program Passes::send_sums(Actor& self, std::int32_t number, std::uint32_t epoch,
                          Known const& known) {
  if (!dedup()) co_return;
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const all = owner_totals(shape_, known.plan.data(), self.rank).rows;
  std::int32_t awaited = 0;  // blocks
  for (std::int32_t i = number; i < all; i += options_.ctas * options_.communication_warps) {
    PoolRow const row = rows.at(i);
    Entry const entry = Entry::from(co_await self.read(
        window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
    if (entry.place + 1 != entry.rows) continue;
    // Its own block is the group's last one. Every block before it is awaited too, as where the group's other rows lie
    // is known only once they are there.
    for (; awaited <= row.block && !breaks(Break::sum_without_down_tiles); ++awaited) {
      co_await self.wait_count(local(self, local_.down_tiles(bank_of(epoch), awaited)),
                               static_cast<std::uint64_t>(shape_.down_tiles()), Site::down_tiles);
    }
    co_await send_sum(self, epoch, row.source,
                      entry.pair / static_cast<std::uint32_t>(shape_.max_top_k),
                      static_cast<std::int32_t>(entry.rows));
  }
}

Program Passes::send_sum(Actor& self, std::uint32_t epoch, std::int32_t source, std::int64_t token,
                         std::int32_t rows) {
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(shape_.down_tiles()), 0);
  for (std::int32_t place = 0; place < rows; ++place) {
    auto const pool_row = static_cast<std::int64_t>(
        co_await self.read(local(self, local_.group_row(source, token, place))));
    for (std::size_t tile = 0; tile < sums.size(); ++tile) {
      sums[tile] =
          mix(sums[tile], co_await self.read(y(self, pool_row, static_cast<std::int32_t>(tile))));
    }
  }
  for (std::size_t tile = 0; tile < sums.size(); ++tile) {
    auto const t = static_cast<std::int32_t>(tile);
    note(pushed_, epoch, source, token * shape_.ranks + self.rank, t, "pushed");
    co_await self.write(slot(source, token, self.rank, t), sums[tile], Proxy::async);
  }
  if (!breaks(Break::sum_before_written)) co_await self.wait_written();
  Address const word = window(source, window_.part_done_word(self.rank, token));
  if (breaks(Break::part_done_relaxed)) {
    co_await self.relaxed(word, epoch);
  } else {
    co_await self.release(word, epoch, Scope::sys);
  }
}

// Where the owner of `expert` says that the block of this rank's index-th row there is done.
Address Passes::done_word(Actor const& self, std::int32_t expert, std::uint64_t index,
                          Known const& known) const {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  std::int32_t block = block_of_pair(shape_, counts, known.plan.data(), expert, self.rank,
                                     static_cast<std::int32_t>(index));
  if (breaks(Break::rows_in_rank_order)) {
    std::int32_t ahead = 0;
    for (std::int32_t s = 0; s < self.rank; ++s) ahead += counts.at(s, expert);
    block = known.plan[static_cast<std::size_t>(expert)].first_block +
            (ahead + static_cast<std::int32_t>(index)) / shape_.block_rows;
  }
  return window(self.rank, window_.block_done_word(shape_.owner(expert), block));
}

// A communication warp that has nothing left to pull looks at the tokens of its CTA and adds up those that are
// complete. It may stop at any time: who has had the tasks takes what is left.
Program Passes::sum_complete(Actor& self, std::int32_t cta, std::uint32_t epoch,
                             Known const& known) {
  for (std::int32_t t = cta; t < exchange(epoch).tokens(self.rank); t += options_.ctas) {
    bool complete = false;
    co_await look_at_token(self, t, epoch, known, complete);
    if (!complete && !breaks(Break::claim_before_complete)) continue;
    std::uint64_t const claims = co_await self.ask(claim(self, epoch, t));
    if (!complete || (claims != 0 && !breaks(Break::sum_without_claim))) continue;
    co_await aggregate(self, t, epoch, known, !breaks(Break::sum_without_acquire));
  }
}

Program Passes::look_at_token(Actor& self, std::int32_t token, std::uint32_t epoch,
                              Known const& known, bool& complete) {
  complete = true;
  for (std::int32_t k = 0; k < shape_.max_top_k && complete; ++k) {
    std::int32_t const pair = token * shape_.max_top_k + k;
    std::int32_t const e = exchange(epoch).expert(self.rank, pair);
    if (e < 0) continue;
    std::uint64_t const index =
        co_await self.read(local(self, local_.pair_index + 4 * std::int64_t{pair}));
    complete =
        co_await self.look(done_word(self, e, index, known), epoch, Until::at_least_epoch) != 0;
  }
}

// Whoever has had the tasks takes a token that is complete, and awaits the first one where none is.
Program Passes::aggregate_all(Actor& self, std::int32_t cta, std::uint32_t epoch,
                              Known const& known) {
  std::vector<std::int32_t> left;
  for (std::int32_t t = cta; t < exchange(epoch).tokens(self.rank); t += options_.ctas) {
    left.push_back(t);
  }
  while (!left.empty()) {
    auto taken = left.begin();
    bool complete = left.size() == 1 || dedup();
    for (auto t = left.begin(); t != left.end() && !complete; ++t) {
      co_await look_at_token(self, *t, epoch, known, complete);
      if (complete) taken = t;
    }
    std::int32_t const token = *taken;
    left.erase(taken);
    bool const is_anothers = options_.sums_early &&
                             co_await self.ask(claim(self, epoch, token)) != 0 &&
                             !breaks(Break::sum_without_claim);
    if (!is_anothers) co_await aggregate(self, token, epoch, known);
  }
}

Program Passes::aggregate(Actor& self, std::int32_t token, std::uint32_t epoch, Known const& known,
                          bool waits) {
  if (dedup()) {
    co_await aggregate_sums(self, token, epoch);
    co_return;
  }
  bool waited = false;
  for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
    std::int32_t const pair = token * shape_.max_top_k + k;
    std::int32_t const e = exchange(epoch).expert(self.rank, pair);
    if (e < 0) continue;
    std::uint64_t const index =
        co_await self.read(local(self, local_.pair_index + 4 * std::int64_t{pair}));
    bool const skip = !waits || breaks(Break::aggregate_without_done) ||
                      (breaks(Break::aggregate_awaits_first_choice_only) && waited);
    if (!skip) {
      co_await self.wait_epoch(done_word(self, e, index, known), epoch, Site::block_done);
    }
    waited = true;
    for (std::int32_t tile = 0; tile < shape_.down_tiles(); ++tile) {
      std::uint64_t const y = co_await self.read(slot(self.rank, token, k, tile));
      note(aggregated_, epoch, self.rank, pair, tile, "aggregated");
      if (y != y_value(a_value(x_value(epoch, self.rank, token), e), tile)) {
        machine_.fault("a wrong or old value in the slot of pair " + std::to_string(pair) +
                       " of rank " + std::to_string(self.rank));
      }
    }
  }
}

// One sum from every owner that has rows of the token.
Program Passes::aggregate_sums(Actor& self, std::int32_t token, std::uint32_t epoch) {
  for (std::int32_t owner = 0; owner < shape_.ranks; ++owner) {
    std::vector<std::int32_t> const choices = group(epoch, self.rank, token, owner);
    if (choices.empty()) continue;
    if (!breaks(Break::aggregate_without_done)) {
      co_await self.wait_epoch(window(self.rank, window_.part_done_word(owner, token)), epoch,
                               Site::part_done);
    }
    for (std::int32_t tile = 0; tile < shape_.down_tiles(); ++tile) {
      std::uint64_t wanted = 0;
      for (std::int32_t const k : choices) {
        std::int32_t const e = exchange(epoch).expert(self.rank, token * shape_.max_top_k + k);
        wanted = mix(wanted, y_value(a_value(x_value(epoch, self.rank, token), e), tile));
      }
      std::uint64_t const sum = co_await self.read(slot(self.rank, token, owner, tile));
      note(aggregated_, epoch, self.rank, std::int64_t{token} * shape_.ranks + owner, tile,
           "aggregated");
      if (sum != wanted) {
        machine_.fault("a wrong or old sum of owner " + std::to_string(owner) + " for token " +
                       std::to_string(token) + " of rank " + std::to_string(self.rank));
      }
    }
  }
}

}  // namespace tessera::dist::model
