// SPDX-License-Identifier: Apache-2.0
// The plan against the exchange written out by hand: every pair on one row, every task once, no task
// before what it needs.
#include "expert_parallel/plan/plan.hpp"
#include "expert_parallel/plan/divisor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "expert_parallel/plan/protocol.hpp"
#include "expert_parallel/session.hpp"
#include "tests/expert_parallel/exchange.hpp"

namespace tessera::expert_parallel {
namespace {

// All that a test of one owner looks at.
struct OwnerPlan {
  Exchange const& exchange;
  std::int32_t owner;
  std::vector<std::int32_t> counts = exchange.counts();
  CountMatrix matrix{counts.data(), exchange.shape.experts};
  std::vector<ExpertPlan> plan;
  std::vector<std::int32_t> list_begin;

  OwnerPlan(Exchange const& e, std::int32_t o)
      : exchange(e),
        owner(o),
        plan(static_cast<std::size_t>(e.shape.experts)),
        list_begin(static_cast<std::size_t>(e.shape.experts)) {
    make_plan(e.shape, matrix, plan.data());
    make_list_begins(e.shape, matrix, owner, list_begin.data());
  }
  [[nodiscard]] OwnerTotals totals() const {
    return owner_totals(exchange.shape, plan.data(), owner);
  }
  [[nodiscard]] RowCursor rows() const {
    return {exchange.shape, matrix, plan.data(), list_begin.data(), owner};
  }
  [[nodiscard]] TaskCursor tasks(std::int32_t lag) const {
    return {exchange.shape, plan.data(), owner, lag};
  }
  [[nodiscard]] std::vector<TaskPair> pairs(std::int32_t lag) const {
    std::vector<TaskPair> all;
    TaskCursor cursor = tasks(lag);
    TaskPair pair = {};
    for (std::int64_t ticket = 0; cursor.find(ticket, pair); ++ticket) all.push_back(pair);
    return all;
  }

  struct Place {
    std::int32_t expert, unit;
    std::int32_t rows;  // no pads
  };
  // Of every block.
  [[nodiscard]] std::vector<Place> places() const {
    ExchangeShape const& shape = exchange.shape;
    std::vector<Place> all;
    for (std::int32_t l = 0; l < shape.local_experts(); ++l) {
      std::int32_t const e = owner * shape.local_experts() + l;
      ExpertPlan const& expert = plan[static_cast<std::size_t>(e)];
      std::int32_t const blocks = blocks_of(shape, expert.rows), units = units_of(blocks);
      std::int32_t left = expert.rows;
      for (std::int32_t unit = 0; unit < units; ++unit) {  // larger ones first
        for (std::int32_t b = blocks / units + (unit < blocks % units ? 1 : 0); b > 0; --b) {
          all.push_back({e, expert.first_unit + unit, std::min(left, shape.block_rows)});
          left -= shape.block_rows;
        }
      }
    }
    return all;
  }
};

std::vector<Task> tasks_of(TaskPair const& pair) {
  if (!pair.has_second) return {pair.first};
  return {pair.first, pair.second()};
}

// The list that `source` writes for `owner`: by expert, tokens ascending.
std::vector<std::int32_t> list_of(Exchange const& exchange, std::int32_t source,
                                  std::int32_t owner) {
  std::vector<std::int32_t> pairs;
  for (std::int32_t e = 0; e < exchange.shape.experts; ++e) {
    if (exchange.shape.owner(e) != owner) continue;
    for (std::int32_t pair = 0; pair < exchange.pairs(source); ++pair) {
      if (exchange.expert(source, pair) == e) pairs.push_back(pair);
    }
  }
  return pairs;
}

std::vector<Exchange> exchanges() {
  std::vector<Exchange> all;
  std::uint64_t seed = 0;
  for (std::int32_t const ranks : {1, 2, 3, 4, 8}) {
    for (std::int32_t const local : {1, 2, 5}) {
      for (std::int32_t const top_k : {1, 2, 40}) {  // 40: K = E
        for (std::int32_t const block_rows : {1, 4, 7}) {
          for (Pattern const pattern : kPatterns) {
            all.push_back(draw_exchange({.ranks = ranks,
                                         .max_tokens = 13,
                                         .hidden = 600,
                                         .intermediate = 300,
                                         .experts = ranks * local,
                                         .max_top_k = std::min(top_k, ranks * local),
                                         .block_rows = block_rows},
                                        pattern, ++seed));
          }
        }
      }
    }
  }
  // No token anywhere.
  all.push_back({.shape = {.ranks = 2,
                           .max_tokens = 4,
                           .hidden = 64,
                           .intermediate = 64,
                           .experts = 4,
                           .max_top_k = 1},
                 .ids = std::vector<std::vector<std::int32_t>>(2)});
  return all;
}

TEST(Divisor, QuotientsAreExact) {
  for (std::int32_t const d : {1, 2, 3, 5, 7, 8, 31, 32, 64, 127, 128, 255, 384, 511, 512}) {
    Divisor const by(d);
    auto const most = static_cast<std::uint32_t>((std::uint64_t{1} << 32) / d);
    for (std::uint32_t n = 0; n < 100'000; ++n) {
      ASSERT_EQ(by.quotient(n), n / static_cast<std::uint32_t>(d)) << n << " by " << d;
    }
    // Where a quotient steps, up to the bound. By one a quotient may have 32 bits, which no caller needs.
    for (std::uint32_t n = most; n > most - 10'000; n -= 97) {
      std::uint32_t const step = n / static_cast<std::uint32_t>(d) * static_cast<std::uint32_t>(d);
      for (std::uint32_t const at : {step, step - 1}) {
        if (at >> 31 != 0 && d == 1) continue;
        ASSERT_EQ(by.quotient(at), at / static_cast<std::uint32_t>(d)) << at << " by " << d;
      }
    }
  }
}

TEST(Plan, PutsEveryPairOnOneRow) {
  for (Exchange const& exchange : exchanges()) {
    ExchangeShape const& shape = exchange.shape;
    std::set<std::pair<std::int32_t, std::int32_t>> pulled;  // source, pair
    for (std::int32_t owner = 0; owner < shape.ranks; ++owner) {
      OwnerPlan const own(exchange, owner);
      RowCursor cursor = own.rows();
      std::map<std::int32_t, std::int32_t> filled;  // rows of each block
      std::vector<std::vector<std::int32_t>> lists;
      for (std::int32_t s = 0; s < shape.ranks; ++s) lists.push_back(list_of(exchange, s, owner));
      std::tuple<std::int32_t, std::int32_t, std::int32_t> last{-1, -1, -1};
      for (std::int32_t number = 0; number < own.totals().rows; ++number) {
        PoolRow const row = cursor.at(number);
        std::int32_t const pair =
            lists[static_cast<std::size_t>(row.source)].at(static_cast<std::size_t>(row.entry));
        ASSERT_EQ(exchange.expert(row.source, pair), row.expert);
        ASSERT_TRUE(pulled.insert({row.source, pair}).second);
        ASSERT_EQ(row.position, filled[row.block]++) << "rows of a block in order";
        ASSERT_EQ(row.row, row.block * shape.block_rows + row.position);
        filled[row.block] += row.pad;
        // The source, which has the counts alone, expects its row in this block.
        std::int32_t index = 0;
        for (std::int32_t p = 0; p < pair; ++p) {
          index += exchange.expert(row.source, p) == row.expert ? 1 : 0;
        }
        ASSERT_EQ(block_of_pair(shape, own.matrix, own.plan.data(), row.expert, row.source, index),
                  row.block);
        // By expert; inside one, the owner's rows, then rank owner+1's, .., each by token.
        std::int32_t const turn = (row.source - owner + shape.ranks) % shape.ranks;
        std::tuple const now{row.expert, turn, pair};
        ASSERT_LT(last, now);
        last = now;
      }
      ASSERT_EQ(static_cast<std::int32_t>(filled.size()), own.totals().blocks);
      for (auto const& [block, rows] : filled) ASSERT_EQ(rows, shape.block_rows);
      ASSERT_LE(own.totals().blocks, shape.max_blocks());
      ASSERT_LE(own.totals().rows, shape.max_rows());
    }
    std::size_t routed = 0;
    for (std::int32_t r = 0; r < shape.ranks; ++r) {
      for (std::int32_t p = 0; p < exchange.pairs(r); ++p) {
        routed += exchange.expert(r, p) >= 0 ? 1u : 0u;
      }
    }
    EXPECT_EQ(pulled.size(), routed);
  }
}

TEST(Plan, CursorsSkipWhatOthersTake) {
  // A CTA sees every seventh row and ticket, and finds there what one that sees all finds.
  for (Exchange const& exchange : exchanges()) {
    OwnerPlan const own(exchange, exchange.shape.ranks - 1);
    RowCursor all = own.rows(), some = own.rows();
    for (std::int32_t number = 0; number < own.totals().rows; ++number) {
      PoolRow const a = all.at(number);
      if (number % 7 != 3) continue;
      ASSERT_EQ(some.at(number), a);
    }
    TaskCursor every = own.tasks(2), seventh = own.tasks(2);
    TaskPair a = {}, b = {};
    std::int64_t ticket = 0;
    for (; every.find(ticket, a); ++ticket) {
      if (ticket % 7 != 3) continue;
      ASSERT_TRUE(seventh.find(ticket, b));
      ASSERT_EQ(a, b);
    }
    // However far beyond the last one they ask, and how often.
    ASSERT_FALSE(seventh.find(ticket, b));
    ASSERT_FALSE(seventh.find(ticket + 7, b));
    ASSERT_FALSE(every.find(ticket + 1'000'000'000'000, a));
  }
}

TEST(Tasks, EachOnceAndDownsBehindUpsByTheLag) {
  for (Exchange const& exchange : exchanges()) {
    ExchangeShape const& shape = exchange.shape;
    OwnerPlan const own(exchange, 0);
    std::vector<OwnerPlan::Place> const places = own.places();
    for (std::int32_t const lag : {0, 1, 3, 100}) {
      std::set<std::tuple<TaskKind, std::int32_t, std::int32_t>> seen;
      std::int32_t const all_up_tasks = own.totals().blocks * shape.up_tiles();
      std::int32_t const all_down_tasks = own.totals().blocks * shape.down_tiles();
      std::int32_t last_unit = -1, up_tasks = 0;
      for (TaskPair const& pair : own.pairs(lag)) {
        for (Task const& task : tasks_of(pair)) {
          OwnerPlan::Place const& place = places.at(static_cast<std::size_t>(task.block));
          ASSERT_TRUE(seen.insert({task.kind, task.block, task.tile}).second);
          ASSERT_EQ(task.expert, place.expert);
          if (task.kind == TaskKind::up) {
            ASSERT_LT(task.tile, shape.up_tiles());
            ASSERT_GE(place.unit, last_unit) << "units ascend";
            last_unit = place.unit;
            ++up_tasks;
            continue;
          }
          ASSERT_LT(task.tile, shape.down_tiles());
          for (std::int32_t tile = 0; tile < shape.up_tiles(); ++tile) {
            ASSERT_TRUE(seen.count({TaskKind::up, task.block, tile})) << "a lower ticket";
          }
          ASSERT_TRUE(up_tasks == all_up_tasks || last_unit == place.unit + lag);
        }
      }
      ASSERT_EQ(static_cast<std::int32_t>(seen.size()), all_up_tasks + all_down_tasks);
      ASSERT_EQ(up_tasks, all_up_tasks);
    }
  }
}

TEST(Tasks, ALagBeyondAllUnitsCostsNoSteps) {
  Exchange const exchange = exchanges().front();
  OwnerPlan const own(exchange, 0);
  std::vector<TaskPair> const all = own.pairs(2'000'000'000);  // within a time limit
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all, own.pairs(own.totals().units));
}

TEST(Tasks, PairsReadTheSameRowsOrTheSameWeights) {
  for (Exchange exchange : exchanges()) {
    for (std::int32_t const tiles_of_up : {1, 2, 3, 4}) {
      exchange.shape.intermediate = tiles_of_up * kTileColumns / 2;
      exchange.shape.hidden = (5 - tiles_of_up) * kTileColumns;
      ExchangeShape const& shape = exchange.shape;
      OwnerPlan const own(exchange, shape.ranks - 1);
      std::vector<OwnerPlan::Place> const places = own.places();
      std::set<std::tuple<TaskKind, std::int32_t>> without_second;  // units
      for (TaskPair const& pair : own.pairs(1)) {
        Task const first = pair.first, second = pair.second();
        std::int32_t const tiles =
            first.kind == TaskKind::up ? shape.up_tiles() : shape.down_tiles();
        bool const is_lone_tile = tiles % 2 != 0 && first.tile == tiles - 1;
        auto const block = static_cast<std::size_t>(first.block);
        std::int32_t const unit = places.at(block).unit;
        if (!pair.has_second) {
          ASSERT_TRUE(is_lone_tile);
          ASSERT_TRUE(block + 1 == places.size() || places[block + 1].unit != unit);
          ASSERT_TRUE(without_second.insert({first.kind, unit}).second);
          continue;
        }
        OwnerPlan::Place const& of_second = places.at(static_cast<std::size_t>(second.block));
        ASSERT_EQ(second.kind, first.kind);
        ASSERT_EQ(second.expert, first.expert);
        ASSERT_EQ(of_second.expert, places[block].expert);
        ASSERT_EQ(of_second.unit, unit);
        if (pair.shares_rows) {
          ASSERT_EQ(second.block, first.block);
          ASSERT_EQ(second.tile, first.tile + 1);
          ASSERT_LT(second.tile, tiles);
          ASSERT_EQ(first.tile % 2, 0);
        } else {
          ASSERT_EQ(second.tile, first.tile);
          ASSERT_EQ(second.block, first.block + 1);
          ASSERT_TRUE(is_lone_tile || of_second.rows > shape.block_rows / 2)
              << "one is done in half the time";
        }
      }
    }
  }
}

// "up" or "down" where they begin, then tiles:blocks of every pair.
std::string written(std::vector<TaskPair> const& pairs) {
  std::string all;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    Task const first = pairs[i].first, second = pairs[i].second();
    if (i == 0 || pairs[i - 1].first.kind != first.kind) {
      all += first.kind == TaskKind::up ? "up " : "down ";
    }
    all += std::to_string(first.tile);
    if (pairs[i].has_second && second.tile != first.tile) all += "," + std::to_string(second.tile);
    all += ":" + std::to_string(first.block);
    if (pairs[i].has_second && second.block != first.block) {
      all += "," + std::to_string(second.block);
    }
    all += " ";
  }
  return all;
}

TEST(Tasks, PairsOfBlocksGoThroughATileAndBackThroughTheNext) {
  // One expert, blocks of two rows; the tiles of up, then those of down.
  auto const walk = [](std::int32_t rows, std::int32_t up_tiles, std::int32_t down_tiles) {
    ExchangeShape const shape = {.ranks = 1,
                                 .max_tokens = rows,
                                 .hidden = down_tiles * 256,
                                 .intermediate = up_tiles * 128,
                                 .experts = 1,
                                 .max_top_k = 1,
                                 .block_rows = 2};
    Exchange const exchange{shape, {std::vector<std::int32_t>(static_cast<std::size_t>(rows), 0)}};
    return written(OwnerPlan(exchange, 0).pairs(0));
  };
  EXPECT_EQ(walk(8, 3, 4),
            "up 0:0,1 0:2,3 1:2,3 1:0,1 2:0,1 2:2,3 "
            "down 0:0,1 0:2,3 1:2,3 1:0,1 2:0,1 2:2,3 3:2,3 3:0,1 ");
  // A block that is left shares its rows, where there are two tiles.
  EXPECT_EQ(walk(6, 3, 4),
            "up 0:0,1 1:0,1 0,1:2 2:0,1 2:2 "
            "down 0:0,1 1:0,1 0,1:2 2:0,1 3:0,1 2,3:2 ");
  EXPECT_EQ(walk(2, 3, 4), "up 0,1:0 2:0 down 0,1:0 2,3:0 ");
  // So does a half one at the end, and the block before it.
  EXPECT_EQ(walk(7, 3, 4),
            "up 0:0,1 1:0,1 0,1:2 0,1:3 2:0,1 2:2,3 "
            "down 0:0,1 1:0,1 0,1:2 0,1:3 2:0,1 3:0,1 2,3:2 2,3:3 ");
  EXPECT_EQ(walk(5, 3, 4), walk(6, 3, 4));  // left anyway
  EXPECT_EQ(walk(3, 1, 2), "up 0:0,1 down 0,1:0 0,1:1 ");
  EXPECT_EQ(walk(1, 1, 2), "up 0:0 down 0,1:0 ");
  // Two units, 9 blocks and 8 with a half one.
  EXPECT_EQ(walk(33, 3, 2),
            "up 0:0,1 0:2,3 0:4,5 0:6,7 1:6,7 1:4,5 1:2,3 1:0,1 0,1:8 "
            "2:0,1 2:2,3 2:4,5 2:6,7 2:8 "
            "down 0:0,1 0:2,3 0:4,5 0:6,7 1:6,7 1:4,5 1:2,3 1:0,1 0,1:8 "
            "up 0:9,10 0:11,12 0:13,14 1:13,14 1:11,12 1:9,10 0,1:15 0,1:16 "
            "2:9,10 2:11,12 2:13,14 2:15,16 "
            "down 0:9,10 0:11,12 0:13,14 1:13,14 1:11,12 1:9,10 0,1:15 0,1:16 ");
}

TEST(Tasks, UpMakesHalfAsManyColumnsOfAWithAGate) {
  ExchangeShape shape;
  shape.intermediate = 257;
  shape.hidden = 257;
  EXPECT_EQ(shape.up_tiles(), 3);
  EXPECT_EQ(shape.down_tiles(), 2);
  shape.gated = false;
  EXPECT_EQ(shape.up_tiles(), 2);
  EXPECT_EQ(shape.down_tiles(), 2);
}

TEST(Tasks, LagIsAShareOfTheUnitsWithinBounds) {
  ExchangeShape shape = {.ranks = 2};
  auto const lag = [&](std::int32_t units) {
    return default_lag(shape, {.rows = 0, .blocks = 0, .units = units});
  };
  EXPECT_EQ(lag(0), 8);
  EXPECT_EQ(lag(25), 11);
  EXPECT_EQ(lag(100), 16);
  EXPECT_EQ(lag(1000), 16);
  shape.ranks = 4;
  EXPECT_EQ(lag(25), 11);
  EXPECT_EQ(lag(1000), 32);
}

TEST(Tasks, LagHasUpsForEveryCtaWhereRowsAreThereEarly) {
  ExchangeShape shape = {.ranks = 1, .intermediate = 768};  // six tiles
  auto const lag = [&](std::int32_t blocks, std::int32_t units) {
    return default_lag(shape, {.rows = 0, .blocks = blocks, .units = units});
  };
  EXPECT_EQ(lag(0, 0), 8);
  EXPECT_EQ(lag(640, 128), 8);   // 30 up tasks a unit
  EXPECT_EQ(lag(256, 128), 17);  // 12
  EXPECT_EQ(lag(128, 128), 34);  // 6
  shape.ranks = 2;
  EXPECT_EQ(lag(256, 128), 16);  // rows are pulled for long
  shape.transfer = Transfer::once;
  EXPECT_EQ(lag(256, 128), 17);
  EXPECT_EQ(lag(256, 64), 9);  // 24
  EXPECT_EQ(lag(512, 64), 5);
  EXPECT_EQ(lag(512, 32), 4);
  EXPECT_EQ(lag(0, 0), 4);
}

TEST(Plan, SlicesCoverTheTokensOnce) {
  for (std::int32_t const tokens : {0, 1, 5, 131, 132, 133, 1 << 24}) {
    std::int32_t end = 0;
    for (std::int32_t c = 0; c < 132; ++c) {
      TokenSlice const slice = token_slice(tokens, c, 132);
      EXPECT_EQ(slice.begin, end);
      EXPECT_LE(slice.end - slice.begin, tokens / 132 + 1);
      end = slice.end;
    }
    EXPECT_EQ(end, tokens);
  }
}

class Layout : public ::testing::TestWithParam<std::int32_t> {};  // numbers of ranks

TEST_P(Layout, FitsAndHasNoOverlaps) {
  std::int32_t const ranks = GetParam(), last = ranks - 1;
  ExchangeShape const shape{.ranks = ranks,
                            .max_tokens = 8192,
                            .hidden = 2048,
                            .intermediate = 768,
                            .experts = 128,
                            .max_top_k = 8,
                            .transfer = Transfer::once,
                            .training = true};
  WindowLayout const w(shape);
  std::int64_t const begins[] = {w.publish,    w.abort,  w.ack,        w.staged,  w.second_staged,
                                 w.block_done, w.counts, w.row_limits, w.lists,   w.places,
                                 w.x,          w.slots,  w.second_x,   w.dscores, w.bytes};
  for (std::size_t i = 0; i + 1 < std::size(begins); ++i) {
    EXPECT_LT(begins[i], begins[i + 1]);
    EXPECT_EQ(begins[i] % 4096, 0);
  }
  EXPECT_LE(w.abort_word(last) + kWordStride, w.ack);
  EXPECT_LE(w.ack_word(last) + kWordStride, w.staged);
  EXPECT_LE(w.staged_word(last) + kWordStride, w.second_staged);
  EXPECT_LE(w.second_staged_word(last) + kWordStride, w.block_done);
  EXPECT_LE(w.block_done_word(last, shape.max_blocks() - 1) + 4, w.counts);
  EXPECT_LE(w.count_word(1, last, 127) + 8, w.row_limits);
  EXPECT_LE(w.row_limit_word(1, last) + 8, w.lists);
  EXPECT_LE(w.list_entry(1, last, 8192 * 8 - 1) + 16, w.places);
  EXPECT_LE(w.placed_pair(1, last, 8192 * 8 - 1) + 8, w.x);
  EXPECT_LE(w.x_row(8191) + 4096, w.slots);
  EXPECT_LE(w.slot(8191, 7) + 4096, w.second_x);
  EXPECT_LE(w.second_x_row(8191) + 4096, w.dscores);
  EXPECT_LE(w.dscore(8192 * 8 - 1) + 4, w.bytes);
  // x and slots are 2*T*d*(1 + K), lists and places 2*P*T*K*(16 + 8), for training 2*T*d + 4*T*K more; what is left is
  // small.
  constexpr std::int64_t kPairs = std::int64_t{8192} * 8;
  constexpr std::int64_t kRows = std::int64_t{2} * 8192 * 2048;
  EXPECT_LT(w.bytes - kRows * 10 - 2 * ranks * kPairs * 24 - 4 * kPairs,
            ranks * (std::int64_t{32} << 10));
  ExchangeShape inference = shape;
  inference.training = false;
  EXPECT_EQ(WindowLayout(inference).bytes, w.bytes - kRows - 4 * kPairs);

  LocalLayout const l(shape, 132);
  EXPECT_LE(l.sum_draws(0) + kWordStride, l.arrived(0, 0));
  EXPECT_EQ(l.a_ready(0, 0) - l.arrived(0, shape.max_blocks() - 1), 4);
  EXPECT_EQ(l.down_tiles(0, 0) - l.a_ready(0, shape.max_blocks() - 1), 4);
  EXPECT_LE(l.down_tiles(0, shape.max_blocks() - 1) + 4, l.bank(1));
  EXPECT_LE(l.down_tiles(1, shape.max_blocks() - 1) + 4, l.histograms);
  EXPECT_LE(l.histogram(131) + 4 * 128, l.pair_index);
}

TEST_P(Layout, OfPartialCombineHasAWordForEverySum) {
  std::int32_t const ranks = GetParam(), last = ranks - 1;
  ExchangeShape const shape{.ranks = ranks,
                            .max_tokens = 8192,
                            .hidden = 2048,
                            .intermediate = 768,
                            .experts = 128,
                            .max_top_k = 8,
                            .transfer = Transfer::partial_combine};
  WindowLayout const w(shape);
  EXPECT_LE(w.block_done_word(last, shape.max_blocks() - 1) + 4, w.partial_done);
  EXPECT_EQ(w.partial_done % 4096, 0);
  EXPECT_LE(w.partial_done_word(last, 8191) + 4, w.counts);
  EXPECT_EQ(w.partial_done_word(0, 8191) + 4, w.partial_done_word(1, 0));
  EXPECT_EQ(w.placed_pair(0, 1, 0) + 8, w.placed_pair(0, 1, 1));
  EXPECT_LE(w.placed_pair(1, last, 8192 * 8 - 1) + 8, w.x);
  EXPECT_LE(w.slot(8191, 7) + 4096, w.bytes);
  // Of what once has, these words alone are more; a GPU keeps no more to itself.
  ExchangeShape once = shape;
  once.transfer = Transfer::once;
  EXPECT_EQ(w.bytes - WindowLayout(once).bytes, 4 * ranks * 8192);
  EXPECT_EQ(LocalLayout(shape, 132).bytes, LocalLayout(once, 132).bytes);
  // Windows of other transfers have no place for them, and those of direct none for `places`.
  EXPECT_EQ(WindowLayout(once).partial_done, WindowLayout(once).counts);
  ExchangeShape direct = shape;
  direct.transfer = Transfer::direct;
  EXPECT_EQ(WindowLayout(direct).places, WindowLayout(direct).x);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Layout, ::testing::Values(2, 4, kMaxRanks));

TEST(Owners, AddUpAllExpertsButTheLastQuarter) {
  auto const added = [](std::int32_t local, Transfer transfer) {
    return ExchangeShape{.ranks = 2, .experts = 2 * local, .transfer = transfer}.partial_experts();
  };
  EXPECT_EQ(added(1, Transfer::partial_combine), 1);
  EXPECT_EQ(added(3, Transfer::partial_combine), 3);
  EXPECT_EQ(added(4, Transfer::partial_combine), 3);
  EXPECT_EQ(added(32, Transfer::partial_combine), 24);
  EXPECT_EQ(added(32, Transfer::once), 0);
  EXPECT_EQ(added(32, Transfer::direct), 0);
}

TEST(Window, KnowsRowsInTheirPlace) {
  std::array<std::uint16_t, 8 * 16> x = {};  // of the window
  auto const in_place = [&](std::uint16_t const* rows, std::int32_t tokens, std::int64_t pitch) {
    return StagedRows{rows, pitch}.lie_at(x.data(), tokens, 16);
  };
  EXPECT_TRUE(in_place(x.data(), 8, 16));
  EXPECT_TRUE(in_place(x.data(), 3, 16));
  EXPECT_TRUE(in_place(x.data(), 1, 1)) << "of one row any stride";
  EXPECT_TRUE(in_place(nullptr, 0, 0)) << "no rows";
  EXPECT_FALSE(in_place(x.data(), 4, 32)) << "every second row";
  EXPECT_FALSE(in_place(x.data() + 16, 4, 16));
}

TEST(Epochs, CompareAcrossTheWrap) {
  EXPECT_TRUE(reached(5, 5));
  EXPECT_TRUE(reached(6, 5));
  EXPECT_FALSE(reached(4, 5));
  EXPECT_TRUE(reached(1, 0xffffffffu));
  EXPECT_FALSE(reached(0xffffffffu, 1));
}

}  // namespace
}  // namespace tessera::expert_parallel
