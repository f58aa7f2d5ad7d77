// SPDX-License-Identifier: Apache-2.0
// Choices of token rounding and expert choice with one thing wrong: verify's rules must reject each.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/verify/support.hpp"
#include "verify/names.hpp"
#include "verify/runner.hpp"

namespace tessera::verify {
namespace {

constexpr std::int64_t kTokens = 60, kExperts = 5, kTopK = 2;
constexpr std::int32_t kTile = 8;

/// A choice as a table, which mutants change.
struct Table {
  MoeDesc desc;
  reference::PairScores pairs;
  std::vector<std::vector<char>> kept;  ///< [E][T]

  [[nodiscard]] std::vector<reference::RankedToken> ranked(std::int64_t e) const {
    return reference::rank_tokens(desc, pairs, e);
  }
  [[nodiscard]] std::int64_t rows(std::int64_t e) const {
    return std::count(kept[e].begin(), kept[e].end(), 1);
  }
  /// Keeps the first `count` of the ranking.
  void keep(std::int64_t e, std::int64_t count) {
    auto const order = ranked(e);
    std::fill(kept[e].begin(), kept[e].end(), 0);
    for (std::int64_t i = 0; i < count; ++i) kept[e][order[i].token] = 1;
  }
  [[nodiscard]] RouterChoice choice() const {
    RouterChoice out;
    out.unrounded_ids = pairs.members;
    out.token_offsets.push_back(0);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t e = 0; e < kExperts; ++e) {
        if (kept[e][t] != 0) out.topk_ids.push_back(e);
      }
      out.token_offsets.push_back(std::ssize(out.topk_ids));
    }
    out.topk_ids.resize(std::max<std::size_t>(out.topk_ids.size(), desc.num_slots()), -1);
    return out;
  }
  [[nodiscard]] bool rejected() const { return !slot_failures(desc, pairs, choice()).empty(); }
};

/// Tokens in threes of equals, so that ties occur in every column and multiples of the tile split some.
Table correct_table(Rounding rounding, RouterKind kind = RouterKind::softmax_topk) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = kTokens, .hidden = 16, .intermediate = 4, .experts = kExperts, .top_k = kTopK};
  layer_case.desc.router.kind = kind;
  layer_case.desc.router.round = rounding;
  layer_case.desc.router.tile = kTile;
  layer_case.seed = 3;
  LayerData data = make_data(layer_case);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    std::copy_n(&data.x[t / 3 * 3 * 16], 16, &data.x[t * 16]);
  }
  RouterChoice const choice = exact_choice(data);
  reference::Inputs const inputs = reference_inputs(data, choice);
  Table table{data.desc, reference::pair_scores(inputs, reference::router_logits(inputs)), {}};
  table.kept.assign(kExperts, std::vector<char>(kTokens, 0));
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t j = choice.token_offsets[t]; j < choice.token_offsets[t + 1]; ++j) {
      table.kept[choice.topk_ids[j]][t] = 1;
    }
  }
  return table;
}

/// An expert that keeps one of two equal tokens and not the other; -1 if there is none.
std::int64_t expert_with_split_tie(Table const& table) {
  for (std::int64_t e = 0; e < kExperts; ++e) {
    auto const order = table.ranked(e);
    std::int64_t const rows = table.rows(e);
    if (rows > 0 && rows < std::ssize(order) && order[rows - 1].member == order[rows].member &&
        order[rows - 1].score == order[rows].score) {
      return e;
    }
  }
  return -1;
}

class RoundingMutants : public testing::TestWithParam<Rounding> {};

TEST_P(RoundingMutants, TheCorrectChoiceIsAccepted) {
  auto const failures =
      slot_failures(correct_table(GetParam()).desc, correct_table(GetParam()).pairs,
                    correct_table(GetParam()).choice());
  EXPECT_TRUE(failures.empty()) << failures.front();
}

TEST_P(RoundingMutants, AWrongRowDroppedIsRejected) {
  for (std::int64_t e = 0; e < kExperts; ++e) {
    Table table = correct_table(GetParam());
    auto const order = table.ranked(e);
    std::int64_t const rows = table.rows(e);
    if (rows == 0 || rows == std::ssize(order)) continue;
    table.kept[e][order[0].token] = 0;  // the strongest goes, the first lost one comes
    table.kept[e][order[rows].token] = 1;
    EXPECT_TRUE(table.rejected()) << "expert " << e;
  }
}

TEST_P(RoundingMutants, AWrongMultipleIsRejected) {
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t const change : {-kTile, kTile, -1, 1}) {
      Table table = correct_table(GetParam());
      std::int64_t const rows = table.rows(e) + change;
      if (rows < 0 || rows > kTokens) continue;
      table.keep(e, rows);
      EXPECT_TRUE(table.rejected()) << "expert " << e << " with " << rows << " rows";
    }
  }
}

TEST_P(RoundingMutants, RowsThatCrowdOutMembersAreRejected) {
  for (std::int64_t e = 0; e < kExperts; ++e) {
    Table table = correct_table(GetParam());
    auto const order = table.ranked(e);
    auto const other =
        std::find_if(order.begin(), order.end(), [](auto const& token) { return !token.member; });
    if (table.rows(e) == 0 || table.kept[e][other->token] != 0) continue;
    table.kept[e][order[0].token] = 0;
    table.kept[e][other->token] = 1;
    EXPECT_TRUE(table.rejected()) << "expert " << e;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, RoundingMutants,
                         testing::Values(Rounding::nr_f, Rounding::sr_f, Rounding::nr_s,
                                         Rounding::balance_f, Rounding::up, Rounding::down));

TEST(RoundingMutant, ATieForTheHigherTokenIsRejected) {
  int seen = 0;
  for (auto const& [name, rounding] : kRoundingNames) {
    if (rounding == Rounding::none) continue;
    Table table = correct_table(rounding);
    std::int64_t const e = expert_with_split_tie(table);
    if (e < 0) continue;
    ++seen;
    auto const order = table.ranked(e);
    std::int64_t const rows = table.rows(e);
    std::swap(table.kept[e][order[rows - 1].token], table.kept[e][order[rows].token]);
    EXPECT_TRUE(table.rejected()) << name;
  }
  EXPECT_GE(seen, 1);
}

TEST(RoundingMutant, AnotherStepsRandomNumbersAreRejected) {
  for (Rounding const rounding : {Rounding::sr_f, Rounding::nr_s}) {
    Table table = correct_table(rounding);
    int rejected = 0;
    for (std::uint64_t step = 1; step <= 8; ++step) {
      table.desc.router.step = step;
      rejected += table.rejected() ? 1 : 0;
    }
    EXPECT_GE(rejected, 6);
  }
}

TEST(RoundingMutant, OfExpertChoiceAreRejected) {
  Table const correct = correct_table(Rounding::none, RouterKind::expert_choice);
  EXPECT_FALSE(correct.rejected());
  for (std::int64_t e = 0; e < kExperts; ++e) {
    Table table = correct;
    table.keep(e, table.rows(e) - 1);
    EXPECT_TRUE(table.rejected());
    table = correct;
    auto const order = table.ranked(e);
    std::swap(table.kept[e][order.front().token], table.kept[e][order.back().token]);
    EXPECT_TRUE(table.rejected());
  }
}

TEST(RoundingMutant, BrokenListsAreRejected) {
  Table const table = correct_table(Rounding::nr_f);
  RouterChoice choice = table.choice();
  std::int64_t const used = choice.token_offsets.back();
  ASSERT_LT(used, std::ssize(choice.topk_ids));
  choice.topk_ids[used] = 0;  // an unused slot with an id
  EXPECT_FALSE(slot_failures(table.desc, table.pairs, choice).empty());
  choice = table.choice();
  for (std::int64_t t = 0; t < kTokens; ++t) {
    if (choice.token_offsets[t + 1] - choice.token_offsets[t] < 2) continue;
    std::swap(choice.topk_ids[choice.token_offsets[t]],
              choice.topk_ids[choice.token_offsets[t] + 1]);
    break;
  }
  EXPECT_FALSE(slot_failures(table.desc, table.pairs, choice).empty());
}

}  // namespace
}  // namespace tessera::verify
