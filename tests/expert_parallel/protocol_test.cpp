// SPDX-License-Identifier: Apache-2.0
// The protocol of the persistent kernel under every schedule that seeds and, at the smallest size,
// enumeration can find: it ends, every row goes once, nothing is read or overwritten too early. Then
// every rule broken in turn, each of which must be noticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>

#include "expert_parallel/plan/choose_transfer.hpp"
#include "tests/expert_parallel/passes.hpp"

namespace tessera::expert_parallel::model {
namespace {

constexpr Temper kTempers[] = {Temper::even, Temper::starve, Temper::run_ahead,
                               Temper::late_writes};

std::vector<Exchange> draw(ExchangeShape const& shape, std::int32_t passes, std::uint64_t seed) {
  std::vector<Exchange> all;
  for (std::int32_t p = 0; p < passes; ++p) {
    std::uint64_t const s = seed * 7 + static_cast<std::uint64_t>(p);
    all.push_back(draw_exchange(shape, kPatterns[s % std::size(kPatterns)], s));
  }
  return all;
}

enum class Judges { all, values_alone };

// What went wrong in one run; empty if nothing.
std::string run(ExchangeShape const& shape, Options const& options, std::uint64_t seed,
                Judges judges = Judges::all) {
  Passes passes(draw(shape, options.passes, seed), options);
  Machine& machine = passes.machine();
  if (judges == Judges::values_alone) machine.ignore_order();
  run_random(machine, kTempers[seed % std::size(kTempers)], seed);
  if (machine.fault().empty() && !machine.finished()) {
    machine.fault("deadlock: " + machine.waiters());
  }
  if (machine.fault().empty()) passes.check_rows();
  return machine.fault();
}

// Two tiles of up and of down, blocks of two rows, several units.
ExchangeShape small(std::int32_t ranks) {
  return {.ranks = ranks,
          .max_tokens = 5,
          .hidden = 512,
          .intermediate = 256,
          .experts = 2 * ranks,
          .max_top_k = 2,
          .block_rows = 2};
}

// The same with up to three rows of a token on an owner.
ExchangeShape small_once(std::int32_t ranks) {
  ExchangeShape shape = small(ranks);
  shape.experts = 3 * ranks;
  shape.max_top_k = std::min(4, shape.experts);
  shape.transfer = Transfer::once;
  return shape;
}
// All of them are added up.
ExchangeShape small_partial_combine(std::int32_t ranks) {
  ExchangeShape shape = small_once(ranks);
  shape.transfer = Transfer::partial_combine;
  return shape;
}
// The last of an owner's four experts is not.
ExchangeShape late_partial_combine(std::int32_t ranks) {
  ExchangeShape shape = small_partial_combine(ranks);
  shape.experts = 4 * ranks;
  return shape;
}

TEST(Protocol, EndsAndLosesNothing) {
  for (std::int32_t const ranks : {1, 2, 3, 4}) {
    for (std::int32_t const ctas : {1, 2, 3}) {
      for (std::int32_t const warps : {1, 2}) {
        Options options = {.ctas = ctas,
                           .communication_warps = warps,
                           .passes = 5,
                           .lag = ctas - 1,
                           .completes_later = warps == 1,
                           .rows_in_flight = 3 - warps,
                           .rows_of_draw = ctas - 1,
                           .prologue_rows = 4 * (warps - 1)};
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
          std::string const where = std::to_string(ranks) + " ranks, " + std::to_string(ctas) +
                                    " CTAs, " + std::to_string(warps) + " warps, seed " +
                                    std::to_string(seed);
          options.rows_by_stores = seed % 2 != 0;
          options.copies_x = seed / 4 % 2 != 0;
          ASSERT_EQ(run(small(ranks), options, seed), "") << where;
          if (seed % 3 != 0) continue;
          ASSERT_EQ(run(small_once(ranks), options, seed), "") << where << ", once";
          ExchangeShape const combined =
              seed % 9 == 0 ? small_partial_combine(ranks) : late_partial_combine(ranks);
          ASSERT_EQ(run(combined, options, seed), "") << where << ", partial combine";
        }
      }
    }
  }
}

// The most blocks that an expert of small() has: a pool of fewer has no places for a unit.
std::int32_t most_blocks(std::int32_t ranks) {
  ExchangeShape const shape = small(ranks);
  return blocks_of(shape, shape.ranks * shape.max_tokens);
}

// Two CTAs with a pool of few blocks, pulls that are announced late, a warp that announces what the others have sent,
// sums by whoever is idle.
Options with_helpers(std::int32_t ranks) {
  return {.passes = 4,
          .ring_blocks = most_blocks(ranks),
          .rows_in_flight = 3,
          .rows_of_draw = 2,
          .announces = true,
          .sums_early = true};
}

TEST(Protocol, EndsWithARingAnAnnouncerAndEarlySums) {
  for (std::int32_t const ranks : {1, 2, 3}) {
    for (std::int32_t const ctas : {1, 2, 3}) {
      for (std::int32_t const places : {0, most_blocks(ranks), most_blocks(ranks) + 1}) {
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
          Options options = with_helpers(ranks);
          options.ctas = ctas;
          options.communication_warps = 1 + static_cast<std::int32_t>(seed / 4 % 2);
          options.lag = static_cast<std::int32_t>(seed % 3);
          options.ring_blocks = places;
          options.announces = seed % 7 != 0;
          options.rows_in_flight = 1 + static_cast<std::int32_t>(seed % 5);
          options.rows_of_draw = static_cast<std::int32_t>(seed / 3 % 4);
          options.prologue_rows = static_cast<std::int32_t>(seed % 6);
          options.rows_by_stores = seed / 2 % 2 != 0;
          ExchangeShape const shape = places > 0          ? small(ranks)
                                      : seed / 5 % 2 == 0 ? small_once(ranks)
                                                          : late_partial_combine(ranks);
          ASSERT_EQ(run(shape, options, seed), "")
              << ranks << " ranks, " << ctas << " CTAs, " << places << " places, seed " << seed;
        }
      }
    }
  }
}

TEST(Protocol, EndsWithManyUnitsAndTiles) {
  ExchangeShape shape = small(2);
  shape.max_tokens = 24;
  shape.block_rows = 1;
  shape.intermediate = 300;
  shape.hidden = 700;
  for (Transfer const transfer : kTransfers) {
    shape.transfer = transfer;
    for (std::int32_t const lag : {0, 1, 3, 100}) {
      for (std::uint64_t seed = 0; seed < 30; ++seed) {
        Options const options = {.ctas = 3,
                                 .passes = 3,
                                 .lag = lag,
                                 .rows_of_draw = static_cast<std::int32_t>(seed % 3)};
        ASSERT_EQ(run(shape, options, seed), "") << seed;
      }
    }
  }
}

// Ranks of several hosts: words, lists, rows and results go through queues that are emptied at any time.
TEST(Protocol, EndsByMessages) {
  for (std::int32_t const ranks : {2, 3, 4}) {
    for (std::int32_t const host_ranks : {1, 2}) {
      if (host_ranks == ranks || (ranks == 4 && host_ranks == 1)) continue;
      for (std::int32_t const ctas : {1, 2}) {
        for (std::uint64_t seed = 0; seed < 28; ++seed) {
          Options const options = {.ctas = ctas,
                                   .passes = 4,
                                   .lag = static_cast<std::int32_t>(seed % 3),
                                   .completes_later = seed % 5 != 0,
                                   .rows_in_flight = 1 + static_cast<std::int32_t>(seed % 3),
                                   .rows_by_stores = seed % 2 != 0,
                                   .rows_of_draw = static_cast<std::int32_t>(seed / 2 % 3),
                                   .prologue_rows = static_cast<std::int32_t>(seed % 4),
                                   .announces = seed % 7 == 0,
                                   .sums_early = seed % 6 == 0,
                                   .copies_x = seed / 4 % 2 != 0,
                                   .host_ranks = host_ranks};
          ExchangeShape const shapes[] = {small(ranks), small_once(ranks),
                                          small_partial_combine(ranks),
                                          late_partial_combine(ranks)};
          for (ExchangeShape const& shape : shapes) {
            ASSERT_EQ(run(shape, options, seed), "")
                << ranks << " ranks, hosts of " << host_ranks << ", " << ctas << " CTAs, seed "
                << seed << ", transfer " << static_cast<int>(shape.transfer);
          }
        }
      }
    }
  }
}

// One actor counts, another looks at the counter and takes one of the outcomes for a fault.
class Looks : public World {
 public:
  explicit Looks(std::uint64_t fault_at) {
    Actor& looker = machine_.add(0, 0, "looker");
    Actor& counter = machine_.add(0, 1, "counter");
    machine_.start(looker, look(looker, fault_at));
    machine_.start(counter, count(counter));
  }
  Machine& machine() override { return machine_; }

 private:
  static constexpr Address kWord = {0, Space::local, 0};
  Program look(Actor& self, std::uint64_t fault_at) {
    std::uint64_t const seen = co_await self.look(kWord, 1);
    if (seen == fault_at) machine_.fault("seen");
  }
  static Program count(Actor& self) { co_await self.count(kWord, 1); }

  Machine machine_{1};
};

TEST(Exploration, FindsBothOutcomesOfALook) {
  for (std::uint64_t const outcome : {0u, 1u}) {
    Exploration const all = explore([&] { return std::make_unique<Looks>(outcome); }, 100);
    EXPECT_EQ(all.fault, "seen") << outcome;
  }
}

TEST(Protocol, EndsInEveryOrderAtTheSmallestSize) {
  struct Small {
    std::int32_t top_k;
    std::vector<std::vector<std::int32_t>> ids;  // [rank][token * top_k + choice]
    std::int32_t ctas, passes;
    std::int32_t ring_blocks = 0;
    bool sums_early = false, announces = false;
    Transfer transfer = Transfer::direct;
    std::int32_t rows_of_draw = 0;
    std::int32_t experts = 0;     // of all ranks; 0: two for every choice
    std::int32_t host_ranks = 0;  // 1: by messages
  };
  Small const cases[] = {
      {1, {{0, 1}, {1, 0}}, 1, 1},  // each sends a row to the other one and keeps one
      {1, {{0, 0}, {0, 0}}, 1, 1},  // all to one expert
      {1, {{1}, {0}}, 1, 2},        // two passes: a rank may be one ahead
      {1, {{1, 1}, {}}, 1, 3},      // a rank without tokens, three passes
      {1, {{0}, {0}}, 2, 1},
      {2, {{3, 2}, {}}, 1, 2, 0, false, false, Transfer::once},     // a row for two places
      {2, {{3, 2}, {}}, 2, 1, 0, false, false, Transfer::once, 1},  // drawn by two warps
      {2, {{3, 2}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},
      {2,
       {{3, 2}, {}},
       2,
       1,
       0,
       false,
       false,
       Transfer::partial_combine,
       1},  // added up by whoever draws
      {2, {{3, 2}, {0, 1}}, 1, 1, 0, false, false, Transfer::partial_combine},  // on both ranks
      {2, {{0, 2}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},      // nowhere
      {2, {{3, 3}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},      // of one expert
      {3, {{4, 7, 6}, {}}, 1, 1, 0, false, false, Transfer::partial_combine, 1, 8},  // two of three
      {1, {{0, 0, 0}, {}}, 1, 1, 1},  // two blocks in turn in one place
      {1, {{0, 0}, {0}}, 1, 1, 1, true},
      {1, {{1}, {0}}, 1, 2, 0, true},
      {1, {{1, 0}, {0}}, 1, 1, 1, false, true},
      {.top_k = 1, .ids = {{1}, {0}}, .ctas = 1, .passes = 2, .host_ranks = 1},
      {.top_k = 1, .ids = {{1}, {}}, .ctas = 2, .passes = 1, .host_ranks = 1},
  };
  for (Small const& small_case : cases) {
    ExchangeShape const shape = {
        .ranks = 2,
        .max_tokens = 3,
        .hidden = 256,
        .intermediate = 128,
        .experts = small_case.experts > 0 ? small_case.experts : 2 * small_case.top_k,
        .max_top_k = small_case.top_k,
        .block_rows = 2,
        .transfer = small_case.transfer};
    std::vector<Exchange> const exchanges(static_cast<std::size_t>(small_case.passes),
                                          Exchange{shape, small_case.ids});
    for (bool const by_stores : {false, true}) {
      auto const make = [&] {
        return std::make_unique<Passes>(exchanges, Options{.ctas = small_case.ctas,
                                                           .passes = small_case.passes,
                                                           .ring_blocks = small_case.ring_blocks,
                                                           .rows_in_flight = 2,
                                                           .rows_by_stores = by_stores,
                                                           .rows_of_draw = small_case.rows_of_draw,
                                                           .sums_early = small_case.sums_early,
                                                           .copies_x = by_stores,
                                                           .host_ranks = small_case.host_ranks});
      };
      Exploration const all = explore(make, 1'000'000);
      EXPECT_EQ(all.fault, "");
      EXPECT_TRUE(all.complete);
      EXPECT_GT(all.states, 30);
    }
  }
}

struct Broken {
  Break rule;
  char const* name;
  char const* notice;  // part of the fault: that it was noticed for the right reason
  QueueBreak queues = QueueBreak::nothing;
};

void expect_noticed(Broken const& broken, ExchangeShape const& shape,
                    Options options = {.passes = 5}) {
  std::string last = "nothing";
  options.broken = broken.rule;
  options.queues = broken.queues;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::string const fault = run(shape, options, seed);
    if (fault.empty()) continue;
    if (fault.find(broken.notice) != std::string::npos) return;
    last = fault;
  }
  ADD_FAILURE() << broken.name << ": expected " << broken.notice << ", noticed " << last;
}

TEST(Protocol, EveryBrokenRuleIsNoticed) {
  Broken const all[] = {
      {Break::publish_without_waiting_for_slices, "publish_without_waiting_for_slices", "read"},
      {Break::publish_relaxed, "publish_relaxed", "without acquiring"},
      {Break::publish_at_gpu_scope, "publish_at_gpu_scope", "without acquiring"},
      {Break::written_relaxed, "written_relaxed", "without acquiring"},
      {Break::prefix_without_waiting, "prefix_without_waiting", "read"},
      {Break::one_parity, "one_parity", ""},
      {Break::plan_without_counts, "plan_without_counts", "counts of another pass"},
      {Break::lists_without_publish, "lists_without_publish", "read"},
      {Break::lists_await_equal_epoch, "lists_await_equal_epoch", "waits at publish"},
      {Break::arrived_before_written, "arrived_before_written", "nobody waited for"},
      {Break::arrived_relaxed, "arrived_relaxed", "without acquiring"},
      {Break::pull_without_proxy_fence, "pull_without_proxy_fence", "proxy fence"},
      {Break::rows_awaited_with_pads, "rows_awaited_with_pads", "waits at arrived"},
      {Break::row_pulled_twice, "row_pulled_twice", "a row twice"},
      {Break::rows_in_rank_order, "rows_in_rank_order", ""},
      {Break::up_without_arrived, "up_without_arrived", "read"},
      {Break::up_without_proxy_fence, "up_without_proxy_fence", "proxy fence"},
      {Break::pad_written_without_proxy_fence, "pad_written_without_proxy_fence", "proxy fence"},
      {Break::down_without_a_ready, "down_without_a_ready", "read"},
      {Break::a_before_written, "a_before_written", "nobody waited for"},
      {Break::down_before_up, "down_before_up", "waits at a_ready"},
      {Break::push_before_written, "push_before_written", "nobody waited for"},
      {Break::down_tiles_relaxed, "down_tiles_relaxed", "without acquiring"},
      {Break::done_by_first_tile, "done_by_first_tile", "read"},
      {Break::done_to_first_source_only, "done_to_first_source_only", "waits at block_done"},
      {Break::done_relaxed, "done_relaxed", "without acquiring"},
      {Break::done_at_gpu_scope, "done_at_gpu_scope", "without acquiring"},
      {Break::completed_in_the_next_task_only, "completed_in_the_next_task_only",
       "waits at a_ready"},
      {Break::aggregate_without_done, "aggregate_without_done", "read"},
      {Break::aggregate_awaits_first_choice_only, "aggregate_awaits_first_choice_only", "read"},
      {Break::one_bank, "one_bank", ""},
      {Break::bank_not_cleared, "bank_not_cleared", ""},
  };
  Broken const of_once[] = {
      {Break::every_row_brings, "every_row_brings", "a row twice"},
      {Break::row_to_its_first_place_only, "row_to_its_first_place_only", "waits at arrived"},
      {Break::rows_awaited_with_pads, "rows_awaited_with_pads", "waits at arrived"},
      {Break::draws_begin_with_the_first, "draws_begin_with_the_first", "a row twice"},
      {Break::draws_not_cleared, "draws_not_cleared", "waits at arrived"},
      {Break::prologue_rows_by_both, "prologue_rows_by_both", "a row twice"},
      {Break::stored_rows_without_proxy_fence, "stored_rows_without_proxy_fence",
       "no proxy fence followed"},
      {Break::chunk_loaded_before_read, "chunk_loaded_before_read",
       "what a bulk store may still read"},
      {Break::written_relaxed, "written_relaxed", "without acquiring"},
      {Break::arrived_before_written, "arrived_before_written", "nobody waited for"},
      {Break::up_without_arrived, "up_without_arrived", "read"},
      {Break::one_parity, "one_parity", ""},
      {Break::one_bank, "one_bank", ""},
  };
  Broken const of_partial_combine[] = {
      {Break::sums_before_pulls, "sums_before_pulls", "waits at down_tiles"},
      {Break::sum_without_down_tiles, "sum_without_down_tiles", "read"},
      {Break::sum_awaits_its_last_block_only, "sum_awaits_its_last_block_only", "read"},
      {Break::partial_done_relaxed, "partial_done_relaxed", "without acquiring"},
      {Break::partial_done_at_gpu_scope, "partial_done_at_gpu_scope", "without acquiring"},
      {Break::down_tiles_relaxed, "down_tiles_relaxed", "without acquiring"},
      {Break::down_without_a_ready, "down_without_a_ready", "read"},
      {Break::aggregate_without_done, "aggregate_without_done", "read"},
      {Break::aggregate_awaits_first_choice_only, "aggregate_awaits_first_choice_only", "read"},
      {Break::arrived_before_written, "arrived_before_written", "nobody waited for"},
      {Break::one_parity, "one_parity", ""},
      {Break::one_bank, "one_bank", ""},
  };
  Broken const of_helpers[] = {
      {Break::chunk_loaded_before_read, "chunk_loaded_before_read",
       "what a bulk store may still read"},
      {Break::ring_without_waiting, "ring_without_waiting", "what another may still read"},
      {Break::ring_waits_for_one_up, "ring_waits_for_one_up", "what another may still read"},
      {Break::unannounced_rows_while_waiting, "unannounced_rows_while_waiting", "waits at a_ready"},
      {Break::arrived_before_written, "arrived_before_written", "nobody waited for"},
      {Break::down_tiles_relaxed, "down_tiles_relaxed", "without acquiring"},
      {Break::announced_before_sent, "announced_before_sent", "read"},
      {Break::announced_by_a_relaxed_word, "announced_by_a_relaxed_word", "without acquiring"},
      {Break::a_before_written, "a_before_written", "nobody waited for"},
      {Break::push_before_written, "push_before_written", "nobody waited for"},
      {Break::completed_in_the_next_task_only, "completed_in_the_next_task_only",
       "waits at a_ready"},
      {Break::sum_without_claim, "sum_without_claim", "a row twice"},
      {Break::sum_without_acquire, "sum_without_acquire", "without acquiring"},
      {Break::claim_before_complete, "claim_before_complete", "rows lost"},
      {Break::aggregate_without_done, "aggregate_without_done", "read"},
  };
  for (Broken const& broken : all) expect_noticed(broken, small(2));
  for (Broken const& broken : of_helpers) expect_noticed(broken, small(2), with_helpers(2));
  for (Broken const& broken : of_once) {
    for (ExchangeShape const& shape : {small_once(2), late_partial_combine(2)}) {
      expect_noticed(broken, shape,
                     {.passes = 5, .rows_in_flight = 4, .rows_of_draw = 2, .prologue_rows = 3});
    }
  }
  Broken const of_own_rows[] = {
      {Break::prologue_rows_by_both, "prologue_rows_by_both", "a row twice"},
      {Break::stored_rows_without_proxy_fence, "stored_rows_without_proxy_fence",
       "no proxy fence followed"},
      {Break::lists_without_publish, "lists_without_publish", "read"},
  };
  for (Broken const& broken : of_own_rows) {
    expect_noticed(broken, small(2), {.passes = 5, .prologue_rows = 3});
  }
  Broken const of_stores[] = {
      {Break::stored_rows_without_proxy_fence, "stored_rows_without_proxy_fence",
       "no proxy fence followed"},
      {Break::arrived_relaxed, "arrived_relaxed", "without acquiring"},
      {Break::up_without_arrived, "up_without_arrived", "read"},
      {Break::lists_without_publish, "lists_without_publish", "read"},
  };
  Options const by_stores = {.passes = 5, .rows_in_flight = 2, .rows_by_stores = true};
  for (Broken const& broken : of_stores) {
    expect_noticed(broken, small(2), by_stores);
    expect_noticed(broken, small_once(2), by_stores);
    expect_noticed(broken, small_partial_combine(2), by_stores);
  }
  Options const in_turn = {.passes = 5};
  Options const by_draws = {
      .passes = 5, .rows_in_flight = 4, .rows_of_draw = 2, .prologue_rows = 3};
  for (ExchangeShape const& shape : {small_partial_combine(2), late_partial_combine(2)}) {
    for (Broken const& broken : of_partial_combine) {
      expect_noticed(broken, shape, in_turn);
      expect_noticed(broken, shape, by_draws);
    }
    expect_noticed({Break::sum_draws_not_cleared, "sum_draws_not_cleared", "waits at partial_done"},
                   shape, by_draws);
    expect_noticed(
        {Break::sum_draws_begin_with_the_first, "sum_draws_begin_with_the_first", "a row twice"},
        shape, by_draws);
  }
  for (char const* const notice : {"waits at partial_done", "a wrong or old sum"}) {
    expect_noticed({Break::all_choices_in_the_sum, "all_choices_in_the_sum", notice},
                   late_partial_combine(2));
  }
  for (ExchangeShape const& shape : {small(2), small_once(2), small_partial_combine(2)}) {
    expect_noticed({Break::x_before_written, "x_before_written", "read"}, shape,
                   {.passes = 5, .rows_by_stores = true, .copies_x = true});
  }
}

TEST(Protocol, EveryBrokenRuleOfMessagesIsNoticed) {
  Broken const all[] = {
      {Break::nothing, "signal_overtakes_put", "read", QueueBreak::signal_overtakes_put},
      {Break::nothing, "put_joins_relaxed", "without acquiring", QueueBreak::put_joins_relaxed},
      {Break::nothing, "signal_arrives_relaxed", "without acquiring",
       QueueBreak::signal_arrives_relaxed},
      {Break::one_staging_place, "one_staging_place", "what another may still read"},
      {Break::x_sent_late, "x_sent_late", "read"},
      {Break::publish_without_waiting_for_slices, "publish_without_waiting_for_slices", "read"},
      {Break::plan_without_counts, "plan_without_counts", "counts of another pass"},
      {Break::lists_without_publish, "lists_without_publish", "read"},
      {Break::done_by_first_tile, "done_by_first_tile", "read"},
      {Break::aggregate_without_done, "aggregate_without_done", "read"},
      {Break::one_parity, "one_parity", ""},
  };
  Options const options = {.passes = 5, .host_ranks = 1};
  for (ExchangeShape const& shape : {small(2), small_once(2), small_partial_combine(2)}) {
    for (Broken const& broken : all) expect_noticed(broken, shape, options);
  }
  expect_noticed({Break::x_before_written, "x_before_written", "nobody waited for"}, small(2),
                 {.passes = 5, .rows_by_stores = true, .copies_x = true, .host_ranks = 1});
  // In every order at the smallest size, too.
  ExchangeShape const smallest = {.ranks = 2,
                                  .max_tokens = 1,
                                  .hidden = 256,
                                  .intermediate = 128,
                                  .experts = 2,
                                  .max_top_k = 1,
                                  .block_rows = 2};
  for (QueueBreak const queues : {QueueBreak::nothing, QueueBreak::signal_overtakes_put}) {
    Exploration const found = explore(
        [&] {
          return std::make_unique<Passes>(
              std::vector<Exchange>{{smallest, {{1}, {}}}},
              Options{.ctas = 1, .passes = 1, .host_ranks = 1, .queues = queues});
        },
        1'000'000);
    if (queues == QueueBreak::nothing) {
      EXPECT_EQ(found.fault, "");
      EXPECT_TRUE(found.complete);
    } else {
      EXPECT_NE(found.fault.find("read"), std::string::npos) << found.fault;
    }
  }
  // Buffers and queues alone show it, without the clocks, in some schedule.
  bool noticed = false;
  for (std::uint64_t seed = 0; seed < 500 && !noticed; ++seed) {
    Options overtaken = options;
    overtaken.queues = QueueBreak::signal_overtakes_put;
    noticed = !run(small(2), overtaken, seed, Judges::values_alone).empty();
  }
  EXPECT_TRUE(noticed) << "signals that overtake puts";
}

TEST(Protocol, WrongValuesShowWithoutTheClocks) {
  // Buffers that drain late and in any order are enough to see these, in some schedule.
  for (Break const rule :
       {Break::publish_without_waiting_for_slices, Break::one_parity, Break::lists_without_publish,
        Break::arrived_before_written, Break::up_without_arrived, Break::down_without_a_ready,
        Break::a_before_written, Break::push_before_written, Break::done_by_first_tile,
        Break::aggregate_without_done, Break::aggregate_awaits_first_choice_only}) {
    bool noticed = false;
    for (std::uint64_t seed = 0; seed < 500 && !noticed; ++seed) {
      noticed = !run(small(2), {.broken = rule, .passes = 5}, seed, Judges::values_alone).empty();
    }
    EXPECT_TRUE(noticed) << "rule " << static_cast<int>(rule);
  }
  for (Break const rule : {Break::sum_without_down_tiles, Break::sum_awaits_its_last_block_only,
                           Break::down_without_a_ready, Break::aggregate_without_done}) {
    bool noticed = false;
    for (std::uint64_t seed = 0; seed < 500 && !noticed; ++seed) {
      noticed =
          !run(late_partial_combine(2), {.broken = rule, .passes = 5}, seed, Judges::values_alone)
               .empty();
    }
    EXPECT_TRUE(noticed) << "rule " << static_cast<int>(rule) << ", partial combine";
  }
}

TEST(Protocol, ADeadRankLeavesWaitersNotWrongRows) {
  // It stops anywhere. Every other rank finishes its passes, or waits at a site that a time limit will name; nobody
  // reads what was never sent. A warp that waits for others of its CTA (none) has no limit of its own: theirs ends its
  // wait.
  auto const is_of_peer = [](Site site) {
    return site == Site::counted || site == Site::publish || site == Site::block_done ||
           site == Site::partial_done;
  };
  std::set<Site> sites;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Options options = {.passes = 4};
    if (seed % 4 == 0) options = with_helpers(3);
    options.host_ranks = static_cast<std::int32_t>(seed / 7 % 3);
    ExchangeShape const of_rows_once[] = {small_once(3), small_partial_combine(3),
                                          late_partial_combine(3)};
    ExchangeShape const shape = seed % 2 == 0 ? small(3) : of_rows_once[seed / 8 % 3];
    if (shape.rows_cross_once()) {
      options.rows_in_flight = 2;
      options.rows_by_stores = seed / 24 % 2 != 0;
      options.rows_of_draw = static_cast<std::int32_t>(seed / 48 % 3);
      options.prologue_rows = 3;
      options.copies_x = options.rows_by_stores;
    }
    Passes passes(draw(shape, options.passes, seed), options);
    Machine& machine = passes.machine();
    std::mt19937_64 rng(seed);
    std::int64_t const dies_at = static_cast<std::int64_t>(rng() % 2500);
    run_random(machine, kTempers[seed / 2 % std::size(kTempers)], seed, dies_at);
    if (machine.finished()) continue;
    auto const dead = static_cast<std::int32_t>(seed % 3);
    machine.kill(dead);
    run_random(machine, Temper::even, seed + 1);
    ASSERT_EQ(machine.fault(), "") << seed;
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) {
      if (rank == dead) continue;
      std::vector<Site> const waits = machine.waiting_sites(rank);
      ASSERT_TRUE(machine.finished(rank) || std::any_of(waits.begin(), waits.end(), is_of_peer))
          << "rank " << rank << " reports nothing, seed " << seed << ": " << machine.waiters();
      sites.insert(waits.begin(), waits.end());
    }
  }
  // Only words that peers write can fail to come, and rows whose lists do not come: what a rank has begun with all that
  // it needs, it ends.
  for (Site const site : sites) {
    bool const of_rows = site == Site::arrived || site == Site::a_ready;
    EXPECT_TRUE(is_of_peer(site) || of_rows || site == Site::none) << site_name(site);
  }
  EXPECT_TRUE(sites.count(Site::counted) && sites.count(Site::publish) &&
              sites.count(Site::block_done) && sites.count(Site::partial_done));
}

}  // namespace
}  // namespace tessera::expert_parallel::model
