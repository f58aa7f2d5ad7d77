// SPDX-License-Identifier: Apache-2.0
// The roles after the last down of a token: sums of the owner, sums of the source.
#include <algorithm>
#include <string>

#include "tests/expert_parallel/passes.hpp"
#include "tests/expert_parallel/passes_values.hpp"

namespace tessera::expert_parallel::model {

// Rows again, of experts whose results are added up: with the last of a token's rows its sum. This warp's share, or by
// draws, of which who has ended its tasks takes any that is left.
Program Passes::send_sums(Actor& self, std::int32_t first_draw, std::uint32_t epoch,
                          Known const& known) {
  bool const draws = options_.rows_of_draw > 0;
  if (!combines_partially() || (first_draw == kAnyDraw && !draws)) co_return;
  CountMatrix const counts{known.counts.data(), shape_.experts};
  RowCursor rows(shape_, counts, known.plan.data(), known.list_begin.data(), self.rank);
  std::int32_t const last = self.rank * shape_.local_experts() + shape_.partial_experts() - 1;
  ExpertPlan const& last_added = known.plan[static_cast<std::size_t>(last)];
  std::int32_t const end = last_added.first_row + last_added.rows;
  std::int32_t const at_a_time = std::max(options_.rows_of_draw, 1);
  std::int64_t const word = local_.sum_draws(bank_of(epoch));
  bool const with_the_first = breaks(Break::sum_draws_begin_with_the_first);
  if (first_draw == kAnyDraw) co_await draw(self, word, with_the_first, first_draw);
  Unsignalled unsignalled;
  for (std::int32_t number = first_draw; number * at_a_time < end;) {
    std::int32_t next = number + options_.ctas * options_.communication_warps;
    if (draws) co_await draw(self, word, with_the_first, next);
    std::int32_t const first = number * at_a_time;
    for (std::int32_t i = first; i < std::min(first + at_a_time, end); ++i) {
      PoolRow const row = rows.at(i);
      Entry const entry = Entry::from(co_await self.read(
          window(self.rank, window_.list_entry(parity_of(epoch), row.source, row.entry))));
      if (entry.ends_sum == 0 || row.source == self.rank) continue;
      std::vector<Term> terms;
      co_await read_terms(self, epoch, row.source, entry, terms);
      terms = added_terms(self.rank, row.source, terms);
      std::vector<std::int64_t> pool_rows;
      for (Term const& term : terms) {
        pool_rows.push_back(pool_row(self, row.source, term, known));
      }
      co_await await_blocks(self, epoch, pool_rows, unsignalled);
      co_await send_sum(self, epoch, row.source, terms, pool_rows);
      std::int64_t const token = terms.front().pair / shape_.max_top_k;
      unsignalled.push_back(window(row.source, window_.partial_done_word(self.rank, token)));
      if (static_cast<std::int32_t>(unsignalled.size()) >= options_.rows_in_flight) {
        co_await signal_sums(self, epoch, unsignalled);
      }
    }
    number = next;
  }
  co_await signal_sums(self, epoch, unsignalled);
}

// Each by itself. Sums that have been written are signalled before the first wait.
Program Passes::await_blocks(Actor& self, std::uint32_t epoch,
                             std::vector<std::int64_t> const& rows, Unsignalled& unsignalled) {
  if (breaks(Break::sum_without_down_tiles)) co_return;
  auto const tiles = static_cast<std::uint64_t>(shape_.down_tiles());
  std::int64_t const last_row = *std::max_element(rows.begin(), rows.end());
  for (std::int64_t const row : rows) {
    if (breaks(Break::sum_awaits_its_last_block_only) && row != last_row) continue;
    Address const word = local(self, local_.down_tiles(bank_of(epoch), row / shape_.block_rows));
    bool const there = unsignalled.empty() || co_await self.look(word, tiles) != 0;
    if (!there) co_await signal_sums(self, epoch, unsignalled);
    co_await self.wait_count(word, tiles, Site::down_tiles);
  }
}

// To the slot of the first choice.
Program Passes::send_sum(Actor& self, std::uint32_t epoch, std::int32_t source,
                         std::vector<Term> const& terms, std::vector<std::int64_t> const& rows) {
  std::int64_t const pair = terms.front().pair;
  for (std::int32_t tile = 0; tile < shape_.down_tiles(); ++tile) {
    std::uint64_t sum = 0;
    for (std::int64_t const row : rows) {
      auto const block = static_cast<std::int32_t>(row / shape_.block_rows);
      auto const position = static_cast<std::int32_t>(row % shape_.block_rows);
      sum = mix(sum, co_await self.read(pool(self, block, position, tile)));
    }
    note(pushed_, epoch, source, pair, tile, "pushed");
    co_await push(self,
                  slot(source, pair / shape_.max_top_k,
                       static_cast<std::int32_t>(pair % shape_.max_top_k), tile),
                  sum);
  }
}

Program Passes::signal_sums(Actor& self, std::uint32_t epoch, Unsignalled& unsignalled) {
  for (Address const word : unsignalled) {
    Order const order = breaks(Break::partial_done_relaxed)        ? Order::none
                        : breaks(Break::partial_done_at_gpu_scope) ? Order::gpu
                                                                   : Order::sys;
    co_await signal(self, word, epoch, order);
  }
  unsignalled.clear();
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
    Result result;
    co_await find_result(self, token, k, epoch, known, result);
    if (result.choices.empty()) continue;
    complete = co_await self.look(result.done, epoch, Until::at_least_epoch) != 0;
  }
}

// With the first of several choices that another rank adds up comes their sum, with the others nothing.
Program Passes::find_result(Actor& self, std::int32_t token, std::int32_t choice,
                            std::uint32_t epoch, Known const& known, Result& result) {
  std::int32_t const pair = token * shape_.max_top_k + choice;
  std::int32_t const e = exchange(epoch).expert(self.rank, pair);
  if (e < 0) co_return;
  std::int32_t const owner = shape_.owner(e);
  std::vector<std::int32_t> sum = added(epoch, self.rank, token, owner);
  if (breaks(Break::all_choices_in_the_sum) && owner != self.rank) {
    sum = group(epoch, self.rank, token, owner);
    std::sort(sum.begin(), sum.end());
    if (sum.size() < 2) sum.clear();
  }
  if (std::find(sum.begin(), sum.end(), choice) != sum.end()) {
    if (choice != sum.front()) co_return;
    result = {sum, window(self.rank, window_.partial_done_word(owner, token)), Site::partial_done};
    co_return;
  }
  std::uint64_t const index =
      co_await self.read(local(self, local_.pair_index + 4 * std::int64_t{pair}));
  result = {{choice}, done_word(self, e, index, known), Site::block_done};
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
    bool complete = left.size() == 1;
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
  bool waited = false;
  for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
    Result result;
    co_await find_result(self, token, k, epoch, known, result);
    if (result.choices.empty()) continue;
    bool const skip = !waits || breaks(Break::aggregate_without_done) ||
                      (breaks(Break::aggregate_awaits_first_choice_only) && waited);
    if (!skip) co_await self.wait_epoch(result.done, epoch, result.site);
    waited = true;
    bool const is_sum = result.site == Site::partial_done;
    std::int32_t const pair = token * shape_.max_top_k + k;
    for (std::int32_t tile = 0; tile < shape_.down_tiles(); ++tile) {
      std::uint64_t wanted = 0;
      for (std::int32_t const choice : result.choices) {
        std::int32_t const e = exchange(epoch).expert(self.rank, token * shape_.max_top_k + choice);
        std::uint64_t const y = y_value(a_value(x_value(epoch, self.rank, token), e), tile);
        wanted = is_sum ? mix(wanted, y) : y;
      }
      std::uint64_t const value = co_await self.read(slot(self.rank, token, k, tile));
      note(aggregated_, epoch, self.rank, pair, tile, "aggregated");
      if (value != wanted) {
        machine_.fault(std::string("a wrong or old ") + (is_sum ? "sum" : "value") +
                       " in the slot of pair " + std::to_string(pair) + " of rank " +
                       std::to_string(self.rank));
      }
    }
  }
}

}  // namespace tessera::expert_parallel::model
