// SPDX-License-Identifier: Apache-2.0
// The fused forward kernel of several ranks, from the sources that GPUs get, in many schedules: bit for bit what each
// token's experts give one after the other, whatever the number of ranks, CTAs and passes before.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/emulator/forward_ranks.hpp"

namespace tessera::expert_parallel {
namespace {

using fused::Case;
using fused::Ranks;

ExchangeShape shape(std::int32_t ranks, std::int32_t tokens, std::int32_t hidden,
                    std::int32_t intermediate, std::int32_t experts, std::int32_t top_k,
                    Transfer transfer, bool gated = true) {
  return {.ranks = ranks,
          .max_tokens = tokens,
          .hidden = hidden,
          .intermediate = intermediate,
          .experts = experts,
          .max_top_k = top_k,
          .transfer = transfer,
          .gated = gated};
}

// A pass of every pattern, one behind the other on the same memory.
void expect_right(Case const& c, std::uint32_t jitter_ns = 0) {
  Ranks ranks(c);
  std::vector<Pattern> patterns(std::begin(kPatterns), std::end(kPatterns));
  patterns.push_back(Pattern::repeats);
  std::uint64_t seed = 0;
  for (Pattern const pattern : patterns) {
    ++seed;
    ASSERT_EQ(ranks.pass(draw_exchange(c.shape, pattern, seed), seed, schedule_of(seed), jitter_ns),
              "")
        << c.shape.ranks << " ranks, " << c.ctas << " CTAs, lag " << c.lag << ", transfer "
        << static_cast<int>(c.shape.transfer) << ", pass " << seed;
  }
}

TEST(FusedForward, GivesTheBitsOfEachExpertAlone) {
  for (std::int32_t const ranks : {1, 2, 4}) {
    for (Transfer const transfer : kTransfers) {
      if (ranks == 1 && transfer == Transfer::partial_combine) continue;  // nothing is added up
      expect_right({.shape = shape(ranks, 24, 128, 64, 4, 2, transfer)});
    }
  }
}

// Ranks may be as many as a host has GPUs, or a number that is no power of two.
TEST(FusedForward, ManyRanks) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    expect_right({.shape = shape(kMaxRanks, 7, 72, 64, 2 * kMaxRanks, 4, transfer)});
  }
  // Several tokens of a warp have sums of every owner.
  expect_right(
      {.shape = shape(kMaxRanks, 64, 64, 64, 2 * kMaxRanks, 3, Transfer::partial_combine)});
  expect_right({.shape = shape(5, 9, 64, 64, 15, 3, Transfer::once), .lag = 1});
  expect_right({.shape = shape(6, 5, 64, 72, 6, 2, Transfer::direct), .saves = true});
  expect_right({.shape = shape(kMaxRanks, 6, 64, 64, kMaxRanks, 8, Transfer::once), .saves = true},
               50'000);
}

TEST(FusedForward, AnyNumberOfCtasAndAnyLag) {
  for (Transfer const transfer : kTransfers) {
    for (int const ctas : {2, 9}) {
      expect_right(
          {.shape = shape(2, 17, 64, 64, 6, 3, transfer), .ctas = ctas, .lag = ctas == 2 ? 0 : 1});
    }
  }
}

TEST(FusedForward, ShapesThatFillNoTile) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 9, 200, 72, 6, 3, transfer, false),
                  .activation = ActivationKind::relu2});
  }
  expect_right({.shape = shape(2, 5, 328, 136, 2, 1, Transfer::direct)});
}

TEST(FusedForward, SeveralBlocksAndTilesOfAnExpert) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 20, 520, 200, 4, 2, transfer), .ctas = 4});
    expect_right({.shape = shape(2, 150, 64, 64, 2, 1, transfer)});
  }
}

TEST(FusedForward, SavesWhatBackwardNeeds) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    std::int32_t const ranks = transfer == Transfer::once ? 3 : 1;
    expect_right({.shape = shape(ranks, 16, 64, 64, 6, 2, transfer), .saves = true});
    expect_right({.shape = shape(2, 9, 72, 328, 6, 3, transfer, false),
                  .activation = ActivationKind::relu2,
                  .saves = true});
    expect_right({.shape = shape(2, 20, 136, 200, 4, 2, transfer), .ctas = 4, .saves = true});
  }
  expect_right({.shape = shape(2, 150, 64, 64, 2, 1, Transfer::direct), .lag = 1, .saves = true});
  expect_right({.shape = shape(2, 17, 64, 64, 6, 3, Transfer::once), .ctas = 9, .saves = true},
               50'000);
}

// Where nobody said that rows may be left out.
TEST(FusedForward, MoreRowsThanTheLimitAreReported) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Case const c = {.shape = shape(2, 12, 64, 64, 4, 2, kTransfers[seed % 2]),
                    .saves = true,
                    .may_overflow = false};
    Ranks ranks(c);
    // Capacities: Saved. Of seed 0 all rows of both ranks fit.
    std::string const text =
        ranks.pass(draw_exchange(c.shape, Pattern::random, seed), seed, schedule_of(seed));
    if (seed == 0) {
      EXPECT_EQ(text, "");
    } else {
      EXPECT_NE(text.find(seed == 1 ? "had given up" : "memory for"), std::string::npos) << text;
    }
  }
}

TEST(FusedForward, AddsBiases) {
  constexpr ActivationKind kKind = ActivationKind::clamped_swiglu;
  for (Transfer const transfer : kTransfers) {
    expect_right(
        {.shape = shape(2, 12, 72, 136, 6, 3, transfer), .activation = kKind, .biased = true});
    expect_right({.shape = shape(2, 6, 328, 72, 4, 2, transfer), .activation = kKind});
  }
  expect_right({.shape = shape(2, 9, 136, 200, 4, 2, Transfer::once),
                .activation = kKind,
                .saves = true,
                .biased = true});
}

TEST(FusedForward, RefusesBiasesThatItsKernelDoesNotAdd) {
  Case const c = {.shape = shape(1, 2, 64, 64, 2, 1, Transfer::direct), .biased = true};
  Ranks ranks(c);
  EXPECT_EQ(ranks.pass(draw_exchange(c.shape, Pattern::random, 1), 1, schedule_of(0)),
            "not launched");
}

// Of x, by the kernel: five a row, of which the last has 16 bytes.
TEST(FusedForward, RowsOfSeveralPieces) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    expect_right({.shape = shape(1, 40, 4104, 64, 2, 1, transfer)});
  }
}

// Stores of x that arrive long after they were read from shared memory.
TEST(FusedForward, RowsThatArriveLate) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    Case const c = {.shape = shape(2, 24, 64, 64, 4, 2, transfer)};
    std::uint64_t const seed = transfer == Transfer::once ? 1 : 2;
    ASSERT_TRUE(Ranks::copies_x(c.shape, seed));
    ASSERT_EQ(Ranks(c).pass(draw_exchange(c.shape, Pattern::random, seed), seed,
                            {.seed = seed, .burst = 64, .copies = 2000}),
              "");
  }
}

// Two tiles of three blocks: pairs that share weights, in either direction, and pairs that share rows. B has whole
// groups of 64 rows, as halves of it are shared only then.
TEST(FusedForward, PairsOfEveryKind) {
  expect_right({.shape = shape(1, 330, 320, 192, 1, 1, Transfer::direct), .ctas = 4});
}

// Words of blocks that no pass has had for 2^31 passes.
TEST(FusedForward, BlocksThatWereNeverDoneAreNotDone) {
  for (Transfer const transfer : kTransfers) {
    Case const c = {.shape = shape(2, 40, 64, 64, 4, 2, transfer)};
    Ranks ranks(c, (std::uint32_t{1} << 31) - 1);
    for (std::uint64_t pass = 0; pass < 5; ++pass) {
      Exchange exchange = draw_exchange(c.shape, Pattern::random, pass);
      if (pass < 2) {
        for (auto& ids : exchange.ids) std::fill(ids.begin(), ids.end(), -1);
      }
      ASSERT_EQ(ranks.pass(exchange, pass + 1, schedule_of(pass)), "")
          << "transfer " << static_cast<int>(transfer) << ", pass " << pass;
    }
  }
}

// One CTA is no pair; and sums leave no row of each pair to go back.
TEST(FusedForward, WhatIsNotServedIsNotLaunched) {
  for (Case const& c :
       {Case{.shape = shape(1, 8, 64, 64, 2, 1, Transfer::direct), .ctas = 1},
        Case{.shape = shape(2, 8, 64, 64, 2, 1, Transfer::partial_combine), .saves = true}}) {
    EXPECT_EQ(Ranks(c).pass(draw_exchange(c.shape, Pattern::random, 1), 1, schedule_of(0)),
              "not launched");
  }
}

TEST(FusedForward, DelaysAtEveryWait) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 20, 64, 64, 4, 2, transfer), .ctas = 2}, 200'000);
  }
}

TEST(FusedForward, ARankThatGivesUpSendsNothingWrong) {
  int given_up = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Case const c = {.shape = shape(2, 24, 64, 64, 4, 2, kTransfers[seed % 3])};
    Ranks ranks(c);
    emulator::Schedule const schedule = {.seed = seed, .burst = 1 + static_cast<int>(seed % 64)};
    Exchange const exchange = draw_exchange(c.shape, Pattern::random, seed);
    ASSERT_EQ(ranks.hasty_pass(exchange, seed, schedule, 1 << seed % 20), "") << "seed " << seed;
    given_up += ranks.status(0).ok() ? 0 : 1;
  }
  EXPECT_GE(given_up, 5);
}

// What it sends until it ends may be void, and with few tokens others hardly wait.
TEST(FusedForward, WhatARankThatGaveUpSentIsNotTrusted) {
  for (Transfer const transfer : kTransfers) {
    Case const c = {.shape = shape(2, 3, 64, 64, 4, 2, transfer)};
    Ranks ranks(c);
    ranks.give_up();
    std::string const text =
        ranks.pass(draw_exchange(c.shape, Pattern::random, 1), 1, schedule_of(0));
    EXPECT_NE(text.find("rank 0 had given up"), std::string::npos) << "rank 1 says: " << text;
  }
}

TEST(FusedForward, ARankThatDoesNotComeIsReported) {
  Case const c = {.shape = shape(3, 8, 64, 64, 3, 1, Transfer::direct)};
  Ranks ranks(c);
  EXPECT_EQ(ranks.pass(draw_exchange(c.shape, Pattern::random, 1), 1, schedule_of(0)), "");
  for (std::string const& text : ranks.without(2, schedule_of(0))) {
    EXPECT_TRUE(text.find("the word of rank 2 is 0, expected 2") != std::string::npos ||
                text.find("had given up") != std::string::npos)
        << text;
  }
}

TEST(FusedForward, OneOfManyRanksThatDoesNotComeIsReported) {
  Ranks ranks({.shape = shape(kMaxRanks, 4, 64, 64, kMaxRanks, 2, Transfer::once)});
  for (std::string const& text : ranks.without(5, schedule_of(1))) {
    EXPECT_TRUE(text.find("the word of rank 5 is 0") != std::string::npos ||
                text.find("had given up") != std::string::npos)
        << text;
  }
}

// The word of rank 0 has reached rank 1 alone: from that one the others learn who gave up first.
TEST(FusedForward, WhoLeavesTellsAllRanks) {
  Ranks ranks({.shape = shape(4, 8, 64, 64, 4, 1, Transfer::direct)});
  ranks.give_up();
  for (std::string const& text : ranks.without(0, schedule_of(0))) {
    EXPECT_NE(text.find("rank 0 had given up"), std::string::npos) << text;
  }
}

// Sums on their owner: of two rows, of up to four, of more, of more than eight, each with columns that do not fill a
// warp's loads.
TEST(FusedForward, SumsOfAnyNumberOfRows) {
  expect_right({.shape = shape(4, 6, 1160, 64, 12, 4, Transfer::partial_combine)});
  expect_right({.shape = shape(2, 9, 584, 64, 12, 7, Transfer::partial_combine), .ctas = 4});
  expect_right({.shape = shape(2, 5, 296, 64, 32, 24, Transfer::partial_combine)});
}

// Sums take tokens in groups: of six, two and one where they have five, twelve and all of 32 choices, with more tokens
// for a warp than two groups have.
TEST(FusedForward, AnyNumberOfChoices) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    expect_right({.shape = shape(1, 230, 64, 64, 6, 5, transfer), .ctas = 2});
    expect_right({.shape = shape(2, 70, 64, 64, 14, 12, transfer), .ctas = 2});
    expect_right({.shape = shape(1, 20, 64, 64, 32, 32, transfer), .ctas = 2});
  }
}

}  // namespace
}  // namespace tessera::expert_parallel
