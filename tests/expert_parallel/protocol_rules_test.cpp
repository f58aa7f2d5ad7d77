// SPDX-License-Identifier: Apache-2.0
// Every rule of the protocol broken in turn, each of which must be noticed, by clocks or by wrong values.
#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "tests/expert_parallel/protocol_runs.hpp"

namespace tessera::expert_parallel::model {
namespace {

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

}  // namespace
}  // namespace tessera::expert_parallel::model
