// SPDX-License-Identifier: Apache-2.0
#include "tests/expert_parallel/passes.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "tests/expert_parallel/passes_values.hpp"

namespace tessera::expert_parallel::model {

Passes::Passes(std::vector<Exchange> exchanges, Options const& options)
    : exchanges_(std::move(exchanges)),
      options_(options),
      shape_(exchanges_.front().shape),
      window_(shape_),
      local_(shape_, options.ctas),
      machine_(shape_.ranks),
      peers_(machine_, shape_.ranks, options.host_ranks, window_, options.queues) {
  queues_.resize(static_cast<std::size_t>(shape_.ranks * options_.ctas));
  for (std::int32_t r = 0; r < shape_.ranks; ++r) {
    for (std::int32_t c = 0; c < options_.ctas; ++c) {
      std::string const name = "rank " + std::to_string(r) + " CTA " + std::to_string(c);
      machine_.add(r, c, name);
      for (std::int32_t w = 0; w < options_.communication_warps; ++w) {
        machine_.add(r, c, name + " warp " + std::to_string(w));
      }
      if (options_.announces) machine_.add(r, c, name + " announcer");
    }
  }
  int next = 0;
  auto const start = [&](auto make) {
    Actor& actor = machine_.actor(next++);
    machine_.start(actor, make(actor));
  };
  for (std::int32_t r = 0; r < shape_.ranks; ++r) {
    for (std::int32_t c = 0; c < options_.ctas; ++c) {
      start([&](Actor& self) { return cta(self, c); });
      for (std::int32_t w = 0; w < options_.communication_warps; ++w) {
        start([&](Actor& self) {
          return communication_warp(self, c * options_.communication_warps + w);
        });
      }
      if (options_.announces) start([&](Actor& self) { return announcer(self); });
    }
  }
  peers_.start();
}

void Passes::note(
    std::set<std::tuple<std::uint32_t, std::int32_t, std::int64_t, std::int32_t>>& seen,
    std::uint32_t epoch, std::int32_t source, std::int64_t pair, std::int32_t tile,
    char const* what) {
  if (!seen.insert({epoch, source, pair, tile}).second) {
    machine_.fault(std::string("a row twice: ") + what + " pair " + std::to_string(pair) +
                   " of rank " + std::to_string(source));
  }
}

std::vector<std::int32_t> Passes::group(std::uint32_t epoch, std::int32_t rank, std::int32_t token,
                                        std::int32_t owner) const {
  Exchange const& all = exchange(epoch);
  std::vector<std::int32_t> choices;
  for (std::int32_t k = 0; k < shape_.max_top_k; ++k) {
    std::int32_t const e = all.expert(rank, token * shape_.max_top_k + k);
    if (e >= 0 && shape_.owner(e) == owner) choices.push_back(k);
  }
  std::stable_sort(choices.begin(), choices.end(), [&](std::int32_t i, std::int32_t j) {
    return all.expert(rank, token * shape_.max_top_k + i) <
           all.expert(rank, token * shape_.max_top_k + j);
  });
  return choices;
}

std::vector<std::int32_t> Passes::added(std::uint32_t epoch, std::int32_t rank, std::int32_t token,
                                        std::int32_t owner) const {
  if (owner == rank) return {};
  std::vector<std::int32_t> choices = group(epoch, rank, token, owner);
  std::erase_if(choices, [&](std::int32_t k) {
    std::int32_t const e = exchange(epoch).expert(rank, token * shape_.max_top_k + k);
    return e - owner * shape_.local_experts() >= shape_.partial_experts();
  });
  if (choices.size() < 2) return {};
  std::sort(choices.begin(), choices.end());
  return choices;
}

std::size_t Passes::slots_of(std::uint32_t epoch, std::int32_t rank, std::int32_t token,
                             std::int32_t owner) const {
  std::size_t const sum = added(epoch, rank, token, owner).size();
  return group(epoch, rank, token, owner).size() - (sum > 0 ? sum - 1 : 0);
}

void Passes::check_rows() {
  std::size_t pulls = 0, slots = 0;
  for (std::uint32_t epoch = 1; epoch <= exchanges_.size(); ++epoch) {
    for (std::int32_t r = 0; r < shape_.ranks; ++r) {
      for (std::int32_t t = 0; t < exchange(epoch).tokens(r); ++t) {
        for (std::int32_t owner = 0; owner < shape_.ranks; ++owner) {
          pulls += group(epoch, r, t, owner).size();
          slots += slots_of(epoch, r, t, owner);
        }
      }
    }
  }
  slots *= static_cast<std::size_t>(shape_.down_tiles());
  if (pulled_.size() != pulls || pushed_.size() != slots || aggregated_.size() != slots) {
    machine_.fault("rows lost: " + std::to_string(pulls) + " to pull, " +
                   std::to_string(pulled_.size()) + " pulled; " + std::to_string(slots) +
                   " tiles to return, " + std::to_string(pushed_.size()) + " returned, " +
                   std::to_string(aggregated_.size()) + " aggregated");
  }
}

// What a CTA's warps but the communication warps do.
Program Passes::cta(Actor& self, std::int32_t index) {
  for (std::uint32_t epoch = 1; epoch <= exchanges_.size(); ++epoch) {
    if (index == 0 && !options_.copies_x) co_await stage_x(self, epoch);
    co_await self.boundary();
    if (options_.copies_x) co_await copy_x(self, index, epoch);
    co_await route(self, index, epoch);
    Known known;
    if (!breaks(Break::x_sent_late)) co_await send_x(self, index, epoch);
    co_await publish_lists(self, epoch);
    if (breaks(Break::x_sent_late)) co_await send_x(self, index, epoch);
    co_await make_plan(self, epoch, known);
    co_await wait_lists(self, epoch, self.rank);
    if (once()) {
      co_await pull_prologue_rows(self, index, epoch, known);
    } else {
      co_await copy_own_rows(self, index, epoch, known);
    }
    TaskCursor tasks(shape_, known.plan.data(), self.rank, options_.lag);
    std::vector<TaskPair> backwards;  // from the last ticket to the first
    if (breaks(Break::down_before_up)) {
      TaskCursor all = tasks;
      TaskPair last = {};
      for (std::int64_t i = 0; all.find(i, last); ++i) backwards.push_back(last);
      std::reverse(backwards.begin(), backwards.end());
    }
    Sent sent;
    Sent const none;
    TaskPair pair = {};
    // A CTA of the model stands for a pair of CTAs, one task after the other.
    for (std::int64_t i = index; tasks.find(i, pair); i += options_.ctas) {
      if (breaks(Break::down_before_up)) pair = backwards[static_cast<std::size_t>(i)];
      co_await run(self, epoch, pair.first, known, sent);
      if (!pair.has_second) continue;
      Task const second = pair.second();
      co_await run(self, epoch, second, known, sent);
    }
    co_await complete(self, epoch, sent);
    if (options_.announces) co_await announce_sent(self, epoch, none);  // there are no more
    co_await send_sums(self, kAnyDraw, epoch, known);
    co_await aggregate_all(self, index, epoch, known);
    co_await self.boundary();
  }
}

Program Passes::communication_warp(Actor& self, std::int32_t number) {
  for (std::uint32_t epoch = 1; epoch <= exchanges_.size(); ++epoch) {
    co_await self.boundary();
    Known known;
    co_await make_plan(self, epoch, known);
    for (std::int32_t s = 0; s < shape_.ranks; ++s) co_await wait_lists(self, epoch, s);
    if (!breaks(Break::pull_without_proxy_fence)) co_await self.proxy_fence();
    if (breaks(Break::sums_before_pulls)) co_await send_sums(self, number, epoch, known);
    co_await pull_all(self, number, epoch, known);
    if (!breaks(Break::sums_before_pulls)) co_await send_sums(self, number, epoch, known);
    if (options_.sums_early) {
      co_await sum_complete(self, number / options_.communication_warps, epoch, known);
    }
    co_await self.boundary();
  }
}

// What another kernel, or the caller, did before this one: x lies in the window.
Program Passes::stage_x(Actor& self, std::uint32_t epoch) {
  for (std::int32_t t = 0; t < exchange(epoch).tokens(self.rank); ++t) {
    co_await self.write(window(self.rank, window_.x_row(t)), x_value(epoch, self.rank, t));
  }
}

// Of a CTA's slice, while it routes.
Program Passes::copy_x(Actor& self, std::int32_t index, std::uint32_t epoch) {
  TokenSlice const slice = token_slice(exchange(epoch).tokens(self.rank), index, options_.ctas);
  for (std::int32_t t = slice.begin; t < slice.end; ++t) {
    co_await self.write(window(self.rank, window_.x_row(t)), x_value(epoch, self.rank, t),
                        Proxy::async);
  }
}

Program Passes::route(Actor& self, std::int32_t index, std::uint32_t epoch) {
  Exchange const& all = exchange(epoch);
  auto const experts = static_cast<std::size_t>(shape_.experts);
  TokenSlice const slice = token_slice(all.tokens(self.rank), index, options_.ctas);
  std::vector<std::int32_t> histogram(experts, 0);
  for (std::int32_t p = slice.begin * shape_.max_top_k; p < slice.end * shape_.max_top_k; ++p) {
    if (all.expert(self.rank, p) >= 0) {
      ++histogram[static_cast<std::size_t>(all.expert(self.rank, p))];
    }
  }
  for (std::size_t e = 0; e < experts; ++e) {
    co_await self.write(local(self, local_.histogram(index) + 4 * static_cast<std::int64_t>(e)),
                        static_cast<std::uint64_t>(histogram[e]));
  }
  Address const counted = local(self, local_.slices_counted(bank_of(epoch)));
  co_await self.count(counted, 1);
  if (!breaks(Break::prefix_without_waiting)) {
    co_await self.wait_count(counted, static_cast<std::uint64_t>(options_.ctas), Site::route_scan);
  }
  std::vector<std::int32_t> totals(experts, 0), next(experts, 0);
  for (std::int32_t c = 0; c < options_.ctas; ++c) {
    for (std::size_t e = 0; e < experts; ++e) {
      std::uint64_t const rows =
          co_await self.read(local(self, local_.histogram(c) + 4 * static_cast<std::int64_t>(e)));
      if (c < index) next[e] += static_cast<std::int32_t>(rows);
      totals[e] += static_cast<std::int32_t>(rows);
    }
  }
  co_await send_counts(self, index, epoch, totals);
  co_await write_lists(self, index, epoch, next, totals);

  // The bank of the next pass, which this GPU used last two passes ago.
  if (index == 0 && !breaks(Break::bank_not_cleared)) {
    std::uint32_t const other = epoch + 1;
    co_await self.relaxed(local(self, local_.slices_counted(other)), 0);
    co_await self.relaxed(local(self, local_.slices_written(other)), 0);
    if (!breaks(Break::draws_not_cleared)) {
      co_await self.relaxed(local(self, local_.row_draws(other)), 0);
    }
    if (!breaks(Break::sum_draws_not_cleared)) {
      co_await self.relaxed(local(self, local_.sum_draws(other)), 0);
    }
    for (std::int64_t b = 0; b < shape_.max_blocks(); ++b) {
      co_await self.relaxed(local(self, local_.arrived(other, b)), 0);
      co_await self.relaxed(local(self, local_.a_ready(other, b)), 0);
      co_await self.relaxed(local(self, local_.down_tiles(other, b)), 0);
    }
  }
}

Program Passes::signal(Actor& self, Address word, std::uint64_t value, Order order) {
  co_await peers_.signal(self, word.rank, word.offset, value, order);
}

Program Passes::push(Actor& self, Address to, std::uint64_t value, Proxy proxy) {
  std::optional<Address> const place = peers_.store_if_local(self, to.rank, to.offset);
  if (place.has_value()) {
    co_await self.write(*place, value, proxy);
    co_return;
  }
  std::int64_t const own = breaks(Break::one_staging_place) ? peers_.staged(self.rank, self.id)
                                                            : peers_.staged(to.rank, to.offset);
  co_await self.write(window(self.rank, own), value);
  co_await peers_.put(self, to.rank, to.offset, own);
}

// Who cannot load x is sent it: the rows of the CTA's slice, each once to every rank that has an expert for it.
Program Passes::send_x(Actor& self, std::int32_t index, std::uint32_t epoch) {
  if (options_.host_ranks == 0) co_return;
  if (!breaks(Break::x_before_written)) co_await self.wait_written();
  TokenSlice const slice = token_slice(exchange(epoch).tokens(self.rank), index, options_.ctas);
  for (std::int32_t t = slice.begin; t < slice.end; ++t) {
    for (std::int32_t owner = 0; owner < shape_.ranks; ++owner) {
      std::int64_t const row = window_.x_row(t);
      if (peers_.load_if_local(self, owner, row).has_value()) continue;
      if (group(epoch, self.rank, t, owner).empty()) continue;
      co_await peers_.put(self, owner, peers_.sent_x_row(self.rank, row), row);
    }
  }
}

// Where a rank finds a row of x.
Address Passes::x_of(Actor const& self, std::int32_t source, std::int64_t token) const {
  std::int64_t const row = window_.x_row(token);
  return peers_.load_if_local(self, source, row)
      .value_or(window(self.rank, peers_.sent_x_row(source, row)));
}

// The row of counts to every rank. They say all that there is to know.
Program Passes::send_counts(Actor& self, std::int32_t index, std::uint32_t epoch,
                            std::vector<std::int32_t> const& totals) {
  for (std::int32_t r = index; r < shape_.ranks; r += options_.ctas) {
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
      CountWord const count = {totals[static_cast<std::size_t>(e)], epoch};
      co_await signal(self, window(r, window_.count_word(parity_of(epoch), self.rank, e)),
                      count.word(), Order::none);
    }
  }
}

// The token's choices on the pair's owner. Of those that are added up there the last one, where there are several, ends
// their sum. An owner does not add up its own tokens, which an entry does not say.
void Passes::join_choices(std::uint32_t epoch, std::int32_t rank, Entry& entry) const {
  auto const pair = static_cast<std::int32_t>(entry.pair);
  std::int32_t const owner = shape_.owner(exchange(epoch).expert(rank, pair));
  std::int32_t const first = pair / shape_.max_top_k * shape_.max_top_k;
  std::vector<std::int32_t> const choices = group(epoch, rank, pair / shape_.max_top_k, owner);
  std::uint32_t place = 0;
  std::int32_t sum = 0, last = -1;
  for (std::int32_t const k : choices) {
    if (first + k == pair) entry.place = place;
    ++place;
    entry.choices |= 1u << k;
    std::int32_t const e = exchange(epoch).expert(rank, first + k);
    if (e - owner * shape_.local_experts() >= shape_.partial_experts()) continue;
    ++sum;
    last = first + k;
  }
  entry.ends_sum = sum > 1 && last == pair ? 1 : 0;
}

// Entries into the owners' windows.
Program Passes::write_lists(Actor& self, std::int32_t index, std::uint32_t epoch,
                            std::vector<std::int32_t>& next,
                            std::vector<std::int32_t> const& totals) {
  Exchange const& all = exchange(epoch);
  TokenSlice const slice = token_slice(all.tokens(self.rank), index, options_.ctas);
  for (std::int32_t p = slice.begin * shape_.max_top_k; p < slice.end * shape_.max_top_k; ++p) {
    std::int32_t const e = all.expert(self.rank, p);
    if (e < 0) continue;
    std::int32_t const place = next[static_cast<std::size_t>(e)]++;
    std::int32_t const owner = shape_.owner(e);
    std::int32_t begin = 0;
    for (std::int32_t before = owner * shape_.local_experts(); before < e; ++before) {
      begin += totals[static_cast<std::size_t>(before)];
    }
    Entry entry = {static_cast<std::uint32_t>(p), 0, 0, 0};
    if (once()) {
      join_choices(epoch, self.rank, entry);
      PairPlace const here = {e - owner * shape_.local_experts(), place};
      co_await push(self, window(owner, window_.placed_pair(parity_of(epoch), self.rank, p)),
                    here.word());
    }
    co_await push(self,
                  window(owner, window_.list_entry(parity_of(epoch), self.rank, begin + place)),
                  entry.bits());
    co_await self.write(local(self, local_.pair_index + 4 * std::int64_t{p}),
                        static_cast<std::uint64_t>(place));
  }
}

// The word that says that they are there, from the last CTA.
Program Passes::publish_lists(Actor& self, std::uint32_t epoch) {
  if (!breaks(Break::x_before_written)) co_await self.wait_written();
  Address const counter = local(self, local_.slices_written(bank_of(epoch)));
  std::uint64_t const written = breaks(Break::written_relaxed)
                                    ? co_await self.count_relaxed(counter, 1)
                                    : co_await self.count(counter, 1);
  std::uint64_t const turn = breaks(Break::publish_without_waiting_for_slices)
                                 ? 0
                                 : static_cast<std::uint64_t>(options_.ctas - 1);
  if (written != turn) co_return;
  for (std::int32_t r = 0; r < shape_.ranks; ++r) {
    Address const word = window(r, window_.publish_word(self.rank));
    Order const order = breaks(Break::publish_relaxed)        ? Order::none
                        : breaks(Break::publish_at_gpu_scope) ? Order::gpu
                                                              : Order::sys;
    co_await signal(self, word, epoch, order);
  }
}

Program Passes::make_plan(Actor& self, std::uint32_t epoch, Known& known) {
  auto const experts = static_cast<std::size_t>(shape_.experts);
  known.counts.resize(static_cast<std::size_t>(shape_.ranks) * experts);
  for (std::int32_t s = 0; s < shape_.ranks; ++s) {
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
      CountWord const count = CountWord::of(co_await self.wait_carried(
          window(self.rank, window_.count_word(parity_of(epoch), s, e)),
          breaks(Break::plan_without_counts) ? 0 : epoch, Site::counted));
      if (count.epoch != epoch) machine_.fault("counts of another pass");
      known.counts[static_cast<std::size_t>(s) * experts + static_cast<std::size_t>(e)] =
          count.rows;
    }
  }
  known.plan.resize(experts);
  known.list_begin.resize(experts);
  CountMatrix const counts{known.counts.data(), shape_.experts};
  expert_parallel::make_plan(shape_, counts, known.plan.data());
  make_list_begins(shape_, counts, self.rank, known.list_begin.data());
}

// Entries and places that `source` writes into this rank's window.
Program Passes::wait_lists(Actor& self, std::uint32_t epoch, std::int32_t source) {
  if (breaks(Break::lists_without_publish)) co_return;
  Address const word = window(self.rank, window_.publish_word(source));
  if (breaks(Break::lists_await_equal_epoch)) {
    co_await self.ask({.kind = Kind::wait,
                       .address = word,
                       .value = epoch,
                       .scope = Scope::sys,
                       .site = Site::publish});
  } else {
    co_await self.wait_epoch(word, epoch, Site::publish);
  }
}

Program Passes::run(Actor& self, std::uint32_t epoch, Task const& task, Known const& known,
                    Sent& sent) {
  bool const is_up = task.kind == TaskKind::up;
  Address const word = local(self, is_up ? local_.arrived(bank_of(epoch), task.block)
                                         : local_.a_ready(bank_of(epoch), task.block));
  std::int32_t const rows =
      breaks(Break::rows_awaited_with_pads)
          ? shape_.block_rows
          : rows_of_block(known.plan[static_cast<std::size_t>(task.expert)], task.block);
  auto const target = static_cast<std::uint64_t>(is_up ? rows : shape_.up_tiles());
  if (sent.pending) {
    // Where this task has to wait, it may be for what the last one has to announce.
    std::uint64_t const there = co_await self.look(word, target);
    if (there == 0 && !breaks(Break::completed_in_the_next_task_only)) {
      co_await complete(self, epoch, sent);
    }
  }
  if (!breaks(is_up ? Break::up_without_arrived : Break::down_without_a_ready)) {
    co_await self.wait_count(word, target, is_up ? Site::arrived : Site::a_ready);
  }
  co_await complete(self, epoch, sent);
  sent.task = task;
  sent.sources.clear();
  if (is_up) {
    co_await up(self, task);
  } else {
    co_await down(self, epoch, task, known, sent);
  }
  sent.pending = true;
  // What a down has sent is complete at once where another warp fences for it.
  if (!options_.completes_later || (options_.announces && !is_up)) {
    co_await complete(self, epoch, sent);
  }
}

Program Passes::complete(Actor& self, std::uint32_t epoch, Sent& sent) {
  if (!sent.pending) co_return;
  bool const is_up = sent.task.kind == TaskKind::up;
  if (!breaks(is_up ? Break::a_before_written : Break::push_before_written)) {
    co_await self.wait_written();
  }
  if (options_.announces) {
    co_await announce_sent(self, epoch, sent);
  } else {
    co_await announce(self, epoch, sent);
  }
  sent.pending = false;
}

// A queue of four tasks.
Program Passes::announce_sent(Actor& self, std::uint32_t epoch, Sent const& sent) {
  constexpr std::size_t kPlaces = 4;
  std::vector<Sent>& queue = queue_of(self);
  if (queue.size() >= kPlaces) {
    co_await self.wait_at_least(queue_word(self, epoch, Queue::announced),
                                queue.size() + 1 - kPlaces, Site::none);
  }
  queue.push_back(sent);
  co_await self.ask(
      {.kind = breaks(Break::announced_by_a_relaxed_word) ? Kind::count_relaxed : Kind::count,
       .address = queue_word(self, epoch, Queue::sent),
       .value = 1});
}

Program Passes::announcer(Actor& self) {
  for (std::uint32_t epoch = 1; epoch <= exchanges_.size(); ++epoch) {
    queue_of(self).clear();
    co_await self.boundary();
    for (std::size_t number = 0;; ++number) {
      if (!breaks(Break::announced_before_sent) || queue_of(self).size() <= number) {
        co_await self.wait_at_least(queue_word(self, epoch, Queue::sent), number + 1, Site::none);
      }
      Sent const sent = queue_of(self)[number];
      if (!sent.pending) break;
      co_await announce(self, epoch, sent);
      co_await self.count(queue_word(self, epoch, Queue::announced), 1);
    }
    co_await self.boundary();
  }
}

Program Passes::announce(Actor& self, std::uint32_t epoch, Sent const& sent) {
  if (sent.task.kind == TaskKind::up) {
    co_await self.count(local(self, local_.a_ready(bank_of(epoch), sent.task.block)), 1);
  } else {
    co_await finish_block(self, epoch, sent.task.block, sent.sources);
  }
}

Program Passes::up(Actor& self, Task const& task) {
  if (!breaks(Break::up_without_proxy_fence)) co_await self.proxy_fence();
  for (std::int32_t p = 0; p < shape_.block_rows; ++p) {
    std::uint64_t x = 0;
    for (std::int32_t part = 0; part < parts(); ++part) {
      std::uint64_t const read = co_await self.read(pool(self, task.block, p, part), Proxy::async);
      x = part == 0 || read == x ? read : mix(x, read);
    }
    co_await self.write(a(self, task.block, p, task.tile),
                        x == kPad ? kPad : a_value(x, task.expert), Proxy::async);
  }
}

Program Passes::down(Actor& self, std::uint32_t epoch, Task const& task, Known const& known,
                     Sent& sent) {
  co_await self.proxy_fence();
  ExpertPlan const& expert = known.plan[static_cast<std::size_t>(task.expert)];
  std::int32_t const rows = rows_of_block(expert, task.block);
  for (std::int32_t p = 0; p < shape_.block_rows; ++p) {
    std::uint64_t a_row = 0;
    for (std::int32_t tile = 0; tile < shape_.up_tiles(); ++tile) {
      a_row = co_await self.read(a(self, task.block, p, tile), Proxy::async);
    }
    if (p >= rows) {
      if (a_row != kPad) machine_.fault("a pad is not zero");
      continue;
    }
    std::int64_t const row = std::int64_t{task.block} * shape_.block_rows + p;
    std::uint64_t const origin = co_await self.read(local(self, local_.row_origin + 8 * row));
    sent.sources.insert(
        source_of(task.expert, (task.block - expert.first_block) * shape_.block_rows + p, known));
    if (origin >> 32 == kStays) {  // where x was, which all up tasks of the block have read
      co_await self.write(pool(self, task.block, p, task.tile), y_value(a_row, task.tile));
      continue;
    }
    auto const source = static_cast<std::int32_t>(origin >> 32);
    auto const pair = static_cast<std::int32_t>(origin & 0xffffffffu);
    note(pushed_, epoch, source, pair, task.tile, "pushed");
    co_await push(self, slot(source, pair / shape_.max_top_k, pair % shape_.max_top_k, task.tile),
                  y_value(a_row, task.tile), Proxy::async);
  }
}

std::int32_t Passes::source_of(std::int32_t expert, std::int32_t row, Known const& known) const {
  CountMatrix const counts{known.counts.data(), shape_.experts};
  std::int32_t source = shape_.owner(expert);
  for (; row >= counts.at(source, expert); source = source_after(shape_, source)) {
    row -= counts.at(source, expert);
  }
  return source;
}

// The last down tile of a block signals to its sources, those too whose rows all stay; who adds up waits for the
// counter.
Program Passes::finish_block(Actor& self, std::uint32_t epoch, std::int32_t block,
                             std::set<std::int32_t> const& sources) {
  Address const counter = local(self, local_.down_tiles(bank_of(epoch), block));
  std::uint64_t const before = breaks(Break::down_tiles_relaxed)
                                   ? co_await self.count_relaxed(counter, 1)
                                   : co_await self.count(counter, 1);
  bool const last = before + 1 == static_cast<std::uint64_t>(shape_.down_tiles());
  if (breaks(Break::done_by_first_tile) ? before != 0 : !last) co_return;
  for (std::int32_t const source : sources) {
    Address const word = window(source, window_.block_done_word(self.rank, block));
    Order const order = breaks(Break::done_relaxed)        ? Order::none
                        : breaks(Break::done_at_gpu_scope) ? Order::gpu
                                                           : Order::sys;
    co_await signal(self, word, epoch, order);
    if (breaks(Break::done_to_first_source_only)) co_return;
  }
}

}  // namespace tessera::expert_parallel::model
