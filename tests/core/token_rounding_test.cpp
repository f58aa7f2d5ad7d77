// SPDX-License-Identifier: Apache-2.0
#include "core/token_rounding.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

namespace tessera::core {
namespace {

TEST(Philox, GivesThePublishedNumbers) {
  // Known answers of the Random123 distribution, philox4x32 with 10 rounds, first word.
  EXPECT_EQ(philox_word(0, 0, 0, 0, 0), 0x6627e8d5u);
  EXPECT_EQ(philox_word(~std::uint64_t{0}, ~0u, ~0u, ~0u, ~0u), 0x408f276du);
  EXPECT_EQ(philox_word(0x299f31d0a4093822u, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u),
            0xd16cfe09u);
}

TEST(Philox, EveryPartOfARouterCounts) {
  Router const router{.round = Rounding::sr_f, .seed = 1, .step = 2, .layer = 3};
  std::uint32_t const x = rounding_random(router, 4);
  EXPECT_EQ(x, philox_word(1, 4, 3, 2, 0));
  for (Router const& other :
       {Router{.seed = 2, .step = 2, .layer = 3}, Router{.seed = 1, .step = 3, .layer = 3},
        Router{.seed = 1, .step = 2 + (std::uint64_t{1} << 32), .layer = 3},
        Router{.seed = 1, .step = 2, .layer = 4}}) {
    EXPECT_NE(rounding_random(other, 4), x);
  }
  EXPECT_NE(rounding_random(router, 5), x);
}

TEST(PairRank, OrdersMembersThenScores) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> const ascending = {0.0f, 1e-45f, 1e-30f, 0.5f, 1.0f, 3e38f, kInf, NAN};
  for (bool const member : {false, true}) {
    for (std::size_t i = 0; i + 1 < ascending.size(); ++i) {
      EXPECT_LT(pair_rank(member, ascending[i]), pair_rank(member, ascending[i + 1])) << i;
    }
  }
  EXPECT_LT(pair_rank(false, NAN), pair_rank(true, 0.0f));
  EXPECT_GT(pair_rank(false, 0.0f), 0u);
  EXPECT_EQ(pair_rank(false, -0.0f), pair_rank(false, 0.0f));
  EXPECT_EQ(score_of_rank(pair_rank(true, 0.3f)), 0.3f);
  EXPECT_EQ(score_of_rank(pair_rank(false, 1e-45f)), 1e-45f);
  EXPECT_TRUE(std::isnan(score_of_rank(pair_rank(true, NAN))));
  EXPECT_TRUE(is_member(pair_rank(true, 0)));
  EXPECT_FALSE(is_member(pair_rank(false, NAN)));
}

std::int64_t count_after(Rounding rounding, std::int64_t tile, std::int64_t members,
                         std::int64_t eligible, std::int64_t carry = 0) {
  Router const router{.round = rounding, .tile = static_cast<std::int32_t>(tile), .seed = 9};
  return rounded_count(router, 0, {.members = members, .eligible = eligible}, carry);
}

TEST(RoundedCount, OfTheRulesThatReadCountsOnly) {
  struct Row {
    Rounding rounding;
    std::int64_t tile, members, eligible, carry, expected;
  };
  for (Row const& row : std::vector<Row>{
           {Rounding::nr_f, 8, 20, 100, 0, 16},        // half a tile: down
           {Rounding::nr_f, 8, 21, 100, 0, 24},        //
           {Rounding::nr_f, 7, 4, 100, 0, 7},          // odd tile: 2*4 > 7
           {Rounding::nr_f, 7, 3, 100, 0, 0},          //
           {Rounding::nr_f, 8, 21, 2, 0, 23},          // no more eligible tokens
           {Rounding::nr_f, 8, 24, 100, 0, 24},        // a multiple stays
           {Rounding::nr_f, 1, 23, 100, 0, 23},        // so does everything with M = 1
           {Rounding::up, 8, 17, 100, 0, 24},          //
           {Rounding::up, 8, 0, 100, 0, 0},            // an expert without tokens stays empty
           {Rounding::down, 8, 23, 100, 0, 16},        //
           {Rounding::down, 8, 7, 100, 0, 0},          //
           {Rounding::balance_f, 8, 20, 100, 0, 16},   // |4| < |-4| fails: down
           {Rounding::balance_f, 8, 20, 100, -1, 24},  //
           {Rounding::balance_f, 8, 23, 100, 4, 16},   // |1 + 4| < |-7 + 4| fails
       }) {
    EXPECT_EQ(count_after(row.rounding, row.tile, row.members, row.eligible, row.carry),
              row.expected)
        << static_cast<int>(row.rounding) << ' ' << row.tile << ' ' << row.members;
  }
}

TEST(RoundedCount, BalancedRoundingKeepsEveryPrefixWithinHalfATile) {
  std::uint32_t random = 1;
  for (std::int32_t tile : {1, 2, 3, 7, 64, 128}) {
    std::vector<ExpertPairs> pairs(200);
    for (ExpertPairs& own : pairs) {
      random = random * 1664525u + 1013904223u;
      own.members = (random >> 8) % 500;
      own.eligible = (random >> 20) % 90;
    }
    round_experts({.round = Rounding::balance_f, .tile = tile}, 200, pairs.data());
    std::int64_t sum = 0;
    for (ExpertPairs const& own : pairs) {
      sum += own.takes - own.members;
      EXPECT_LE(2 * std::abs(sum), tile);
      EXPECT_LT(std::abs(own.takes - own.members), tile);
    }
  }
}

TEST(RoundedCount, StochasticRoundingIsUnbiased) {
  constexpr std::int64_t kMembers = 45, kTile = 32;  // up with probability 13/32
  constexpr int kDraws = 20000;
  int up = 0;
  for (int step = 0; step < kDraws; ++step) {
    Router const router{.round = Rounding::sr_f,
                        .tile = kTile,
                        .seed = 3,
                        .step = static_cast<std::uint64_t>(step)};
    std::int64_t const count = rounded_count(router, 7, {.members = kMembers, .eligible = 99}, 0);
    ASSERT_TRUE(count == 32 || count == 64);
    up += count == 64 ? 1 : 0;
  }
  EXPECT_NEAR(up / double{kDraws}, 13.0 / 32, 5 * std::sqrt(0.25 / kDraws));
}

TEST(RoundedCount, ScoresDecideHowOftenNrsGoesUp) {
  constexpr int kDraws = 20000;
  auto const share_up = [](std::uint64_t lost, std::uint64_t gained) {
    int up = 0;
    for (int step = 0; step < kDraws; ++step) {
      Router const router{
          .round = Rounding::nr_s, .tile = 32, .step = static_cast<std::uint64_t>(step)};
      ExpertPairs const pairs{.members = 40, .eligible = 99, .weakest = lost, .best = gained};
      up += rounded_count(router, 0, pairs, 0) == 64 ? 1 : 0;
    }
    return up / double{kDraws};
  };
  double const slack = 5 * std::sqrt(0.25 / kDraws);
  EXPECT_NEAR(share_up(3, 1), 0.75, slack);
  EXPECT_NEAR(share_up(std::uint64_t{1} << 61, std::uint64_t{3} << 61), 0.25, slack);
  EXPECT_EQ(share_up(5, 0), 1);
  EXPECT_EQ(share_up(0, 5), 0);
  EXPECT_EQ(share_up(0, 0), 0);  // as nr_f: 8 of 32
}

TEST(FixedPoint, TruncatesAndSaturates) {
  EXPECT_EQ(fixed_point_score(1.0f), std::uint64_t{1} << 30);
  EXPECT_EQ(fixed_point_score(0x1p-30f), 1u);
  EXPECT_EQ(fixed_point_score(0x1.8p-30f), 1u);
  EXPECT_EQ(fixed_point_score(0x1p-31f), 0u);
  EXPECT_EQ(fixed_point_score(1e30f), 0xffffffffu);
  EXPECT_EQ(fixed_point_score(NAN), 0u);
}

}  // namespace
}  // namespace tessera::core
