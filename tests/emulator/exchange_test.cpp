// SPDX-License-Identifier: Apache-2.0
// The exchange in kernels of its own, from the sources that GPUs get, in many schedules: every table, row, slot and
// word that passes of either kind leave.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "tests/emulator/exchange_ranks.hpp"

namespace tessera::expert_parallel::unfused {
namespace {

ExchangeShape shape(std::int32_t ranks, std::int32_t tokens, std::int32_t hidden,
                    std::int32_t experts, std::int32_t top_k, Transfer transfer) {
  return {.ranks = ranks,
          .max_tokens = tokens,
          .hidden = hidden,
          .intermediate = 64,
          .experts = experts,
          .max_top_k = top_k,
          .transfer = transfer,
          .training = true};
}

constexpr Transfer kTransfers[] = {Transfer::direct, Transfer::once};

// Choices of a pattern, with all kinds of numbers that are no experts.
Exchange draw(ExchangeShape const& shape, Pattern pattern, std::uint64_t seed) {
  Exchange exchange = draw_exchange(shape, pattern, seed);
  std::int32_t const none[] = {-1, shape.experts, INT_MIN, INT_MAX};
  std::size_t i = 0;
  for (std::vector<std::int32_t>& ids : exchange.ids) {
    for (std::int32_t& id : ids) {
      if (id < 0) id = none[i++ % std::size(none)];
    }
  }
  return exchange;
}

// Of every pattern; no rows; no tokens.
std::vector<Exchange> draw_all(ExchangeShape const& shape) {
  std::vector<Exchange> all;
  for (Pattern const pattern : kPatterns) all.push_back(draw(shape, pattern, all.size()));
  all.push_back(draw(shape, Pattern::repeats, all.size()));
  all.push_back(all.front());
  for (std::vector<std::int32_t>& ids : all.back().ids) std::fill(ids.begin(), ids.end(), -1);
  all.push_back(all.front());
  for (std::vector<std::int32_t>& ids : all.back().ids) ids.clear();
  return all;
}

// A pass of each, and one behind it that takes the tables of the pass before.
void expect_right(ExchangeShape const& shape, int ctas = 2, std::uint32_t jitter_ns = 0) {
  Ranks ranks(shape, ctas);
  ranks.set_limits(kNoLimit, jitter_ns);
  std::uint64_t seed = 0;
  Pass const* before = nullptr;
  for (Exchange const& exchange : draw_all(shape)) {
    ++seed;
    bool const odd = seed % 2 == 1;
    Pass& forward = ranks.make(exchange,
                               {.second = seed % 3 == 0,
                                .dscores = seed % 3 == 1,
                                .saves = true,
                                .tight = odd,
                                .copied = seed % 4 == 1,
                                .apart = odd},
                               seed);
    ranks.enqueue(forward);
    Pass& backward = ranks.make({.second = true,
                                 .dscores = true,
                                 .partials = seed % 4 < 2,
                                 .saves = seed % 4 == 2,
                                 .tight = !odd,
                                 .copied = seed % 3 < 2,
                                 .apart = seed % 5 < 3,
                                 .gathered = seed % 2 == 0,
                                 .mixed = seed % 4 > 1,
                                 .beside = seed % 3 > 0},
                                seed + 100, before != nullptr ? *before : forward);
    ASSERT_EQ(ranks.run(backward, schedule_of(seed)), "")
        << shape.ranks << " ranks, " << ctas << " CTAs, hidden " << shape.hidden << ", transfer "
        << static_cast<int>(shape.transfer) << ", choices " << seed;
    before = &forward;
  }
}

TEST(UnfusedExchange, BringsAndReturnsEveryRow) {
  for (std::int32_t const ranks : {1, 2, 3}) {
    expect_right(shape(ranks, 24, 16, 12, 3, Transfer::once));
    expect_right(shape(ranks, 9, 72, 6, ranks == 2 ? 2 : 1, Transfer::direct), 1);
  }
}

// Ranks may be as many as a host has GPUs, or a number that is no power of two.
TEST(UnfusedExchange, ManyRanks) {
  expect_right(shape(kMaxRanks, 9, 16, 2 * kMaxRanks, 4, Transfer::once));
  expect_right(shape(kMaxRanks, 5, 72, kMaxRanks, 2, Transfer::direct), 1, 20'000);
  expect_right(shape(5, 7, 16, 15, 3, Transfer::once), 1);
  expect_right(shape(6, 4, 16, 12, 2, Transfer::direct), 3);
}

// More choices than a warp adds up at once, and more columns.
TEST(UnfusedExchange, ManyChoicesOfWideRows) {
  expect_right(shape(2, 3, 784, 22, 11, Transfer::once), 2);
}

// Of 2048 bytes, of 16 more, and of as many chunks as a ring has.
TEST(UnfusedExchange, RowsOfSeveralChunks) {
  for (std::int32_t const hidden : {1024, 1032, 4104}) {
    expect_right(shape(2, 12, hidden, 4, 2, kTransfers[hidden / 8 % 2]), 1);
  }
}

TEST(UnfusedExchange, ManyCtas) { expect_right(shape(2, 7, 1040, 6, 2, Transfer::direct), 5); }

TEST(UnfusedExchange, DelaysAtEveryWait) {
  expect_right(shape(2, 10, 64, 4, 2, Transfer::once), 2, 50'000);
}

// Of three layers, forward and back: between passes nobody waits but the kernels.
TEST(UnfusedExchange, PassesOneBehindTheOther) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    ExchangeShape const s = shape(3, 11, 16, 6, 2, kTransfers[seed % 2]);
    Ranks ranks(s, seed < 2 ? 1 : 2);
    std::vector<Pass*> forward;
    for (Pattern const pattern : {Pattern::random, Pattern::idle_rank, Pattern::sentinels}) {
      forward.push_back(&ranks.make(draw(s, pattern, seed), {.saves = true, .tight = true}, seed));
      ranks.enqueue(*forward.back());
    }
    for (std::size_t layer = forward.size(); layer-- > 0;) {
      ranks.enqueue(ranks.make({.second = true,
                                .dscores = true,
                                .tight = true,
                                .copied = seed % 2 == 0,
                                .apart = seed < 2,
                                .gathered = seed % 2 == 1,
                                .mixed = layer == 1,
                                .beside = seed / 2 == layer % 2},
                               seed * 8 + layer + 1, *forward[layer]));
    }
    emulator::Schedule schedule = schedule_of(seed);
    schedule.seed = seed + 10;
    ASSERT_EQ(ranks.run(schedule), "") << "seed " << seed;
  }
}

// So many rows of an expert that some of its blocks have none but this rank's.
TEST(UnfusedExchange, BlocksOfOwnRows) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    std::int32_t const all = 1 + static_cast<std::int32_t>(seed);
    ExchangeShape const s = shape(all, 300, 16, 2 * all, 2 * all, Transfer::once);
    Ranks ranks(s);
    Pass& forward =
        ranks.make(draw(s, Pattern::random, seed), {.saves = true, .tight = true}, seed);
    ASSERT_EQ(ranks.run(forward, schedule_of(seed)), "");
    Pass& pass = ranks.make({.second = seed > 0,
                             .dscores = true,
                             .tight = true,
                             .copied = seed == 1,
                             .gathered = true,
                             .beside = true},
                            seed + 1, forward);
    ASSERT_EQ(ranks.run(pass, schedule_of(seed)), "") << all << " ranks";
    EXPECT_GE(pass.shares[0]->ready_blocks[0], 1);
  }
}

TEST(UnfusedExchange, MoreRowsThanTheLimitAreReported) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    std::int32_t const all = 1 + static_cast<std::int32_t>(seed % 3);
    ExchangeShape const s = shape(all, 20, 1032, 6, 2, kTransfers[seed % 2]);
    int const owner = static_cast<int>(seed) % all;
    Ranks ranks(s);
    Exchange const exchange = draw(s, Pattern::random, seed);
    Pass& first = ranks.make(exchange, {.saves = true}, seed);
    ASSERT_EQ(ranks.run(first, schedule_of(seed)), "");
    Kind const kind = {.second = true,
                       .dscores = true,
                       .saves = true,
                       .tight = true,
                       .gathered = seed % 4 == 2,
                       .beside = seed % 8 == 2};
    Pass& pass = seed % 4 < 2 ? ranks.make(exchange, kind, seed) : ranks.make(kind, seed, first);
    Share& small = *pass.shares[static_cast<std::size_t>(owner)];
    std::int64_t const rows = small.capacity;
    small.capacity = seed < 4 ? rows - 1 : 0;
    for (int r = 0; r < all; ++r) ranks.enqueue(pass, r, 3, false);
    ASSERT_EQ(ranks.finish(schedule_of(seed)), "");
    for (int r = 0; r < all; ++r) {
      std::string const text = ranks.status(r).text();
      std::string const wanted =
          r == owner ? "rank " + std::to_string(r) + " has " + std::to_string(rows) +
                           " rows in pass 2, and memory for " + std::to_string(small.capacity)
                     : "rank " + std::to_string(owner) + " had given up";
      EXPECT_NE(text.find(wanted), std::string::npos) << "seed " << seed << ": " << text;
    }
    EXPECT_EQ(ranks.wrong_rows_of(pass, owner), "") << "seed " << seed;
  }
}

// Every rank's host hears of it, no rank gives up, and the pass can be made again.
TEST(UnfusedExchange, RowsMayBeLeftOut) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    std::int32_t const all = 1 + static_cast<std::int32_t>(seed % 3);
    ExchangeShape const s = shape(all, 14, 72, 6, 2, kTransfers[seed % 2]);
    int const owner = static_cast<int>(seed) % all;
    Ranks ranks(s);
    Exchange const exchange = draw(s, Pattern::random, seed);
    Pass& pass = ranks.make(
        exchange,
        {.second = true, .dscores = true, .saves = true, .tight = true, .may_overflow = true},
        seed);
    Share& small = *pass.shares[static_cast<std::size_t>(owner)];
    std::int64_t const rows = small.capacity;
    small.capacity = seed < 3 ? rows - 1 : 0;
    for (int r = 0; r < all; ++r) ranks.enqueue(pass, r, 3, false);
    ASSERT_EQ(ranks.run(schedule_of(seed)), "") << "seed " << seed;
    for (int r = 0; r < all; ++r) {
      RoutedWord const signal = RoutedWord::of(pass.shares[static_cast<std::size_t>(r)]->host_rows);
      EXPECT_FALSE(signal.all_fit);
      if (r == owner) EXPECT_EQ(signal.rows, rows);
    }
    EXPECT_EQ(ranks.wrong_rows_of(pass, owner), "") << "seed " << seed;
    Pass& again = ranks.make(exchange, {.second = true, .saves = true, .tight = true}, seed);
    ASSERT_EQ(ranks.run(again, schedule_of(seed)), "") << "seed " << seed;
  }
}

// The last rank leaves before one of the kernels. Where the peers' tokens have a kernel of their own it counts its CTAs
// all the same, as a GEMM waits for them without a limit.
TEST(UnfusedExchange, ARankThatDoesNotComeIsReported) {
  char const* const sites[] = {" at counted", " at staged", " at ack"};
  for (std::int32_t const all : {2, 3}) {
    for (int kernels = 0; kernels < 3; ++kernels) {
      ExchangeShape const s = shape(all, 8, 64, 6, 2, Transfer::direct);
      Ranks ranks(s);
      Pass& first = ranks.make(draw(s, Pattern::random, 1), {.saves = true}, 1);
      ASSERT_EQ(ranks.run(first, schedule_of(0)), "");
      ranks.set_limits(4'000'000, 0);
      bool const beside = all == 3 && kernels == 1;
      Pass& pass =
          all == 3 && kernels > 0
              ? ranks.make({.second = beside, .gathered = beside, .beside = beside}, 2, first)
              : ranks.make(draw(s, Pattern::random, 2), {}, 2);
      for (int r = 0; r < all; ++r) ranks.enqueue(pass, r, r + 1 < all ? 3 : kernels, false);
      ASSERT_EQ(ranks.finish(schedule_of(0)), "");
      int named = 0;
      for (int r = 0; r + 1 < all; ++r) {
        if (beside) EXPECT_EQ(ranks.wrong_arrivals(pass, r), "");
        std::string const text = ranks.status(r).text();
        EXPECT_NE(text.find(sites[kernels]), std::string::npos) << text;
        std::string const word = "the word of rank " + std::to_string(all - 1) + " is ";
        if (text.find(word) != std::string::npos) ++named;
      }
      EXPECT_GE(named, 1);
    }
  }
}

// Where words of blocks are renewed, and where epochs wrap.
TEST(UnfusedExchange, AnyEpoch) {
  for (std::uint32_t const turn : {std::uint32_t{1} << 30, std::uint32_t{1} << 31, 0u}) {
    ExchangeShape const s = shape(2, 10, 16, 4, 2, Transfer::direct);
    Ranks ranks(s, 2, turn - 2);
    ranks.set_blocks(7);
    Pass const* before = nullptr;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      Pass& pass = seed % 2 == 1 ? ranks.make(draw(s, Pattern::random, seed), {.saves = true}, seed)
                                 : ranks.make({.second = true, .dscores = true, .apart = true},
                                              seed, *before);
      ASSERT_EQ(ranks.run(pass, schedule_of(seed)), "") << "pass " << pass.epoch;
      EXPECT_TRUE(ranks.blocks_are(seed < 3 ? 7 : turn - 1)) << "pass " << pass.epoch;
      if (pass.of == nullptr) before = &pass;
    }
  }
}

TEST(UnfusedExchange, WhatIsNotServedIsNotLaunched) {
  for (ExchangeShape const& s : {shape(1, 8, 12, 4, 2, Transfer::direct),
                                 shape(1, 8, 16, kMaxExperts + 1, 2, Transfer::direct)}) {
    Ranks ranks(s);
    Pass& pass = ranks.make(draw(s, Pattern::random, 1), {}, 1);
    EXPECT_EQ(ranks.run(pass, schedule_of(0)), "not launched");
  }
}

}  // namespace
}  // namespace tessera::expert_parallel::unfused
