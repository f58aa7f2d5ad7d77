// SPDX-License-Identifier: Apache-2.0
#include "verify/case.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "tests/verify/support.hpp"
#include "verify/names.hpp"
#include "verify/random_source.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

std::vector<std::int64_t> counts_of(LayerCase const& layer_case) {
  std::vector<std::int64_t> counts(layer_case.desc.shape.experts, 0);
  for (std::int64_t const id : make_slots(layer_case).topk_ids) {
    if (id >= 0 && id < layer_case.desc.shape.experts) ++counts[id];
  }
  return counts;
}

TEST(RandomSource, HasMeanZeroAndVarianceOne) {
  RandomSource random(3, 4);
  double sum = 0, squares = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    double const value = random.normal();
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kDraws, 0, 0.02);
  EXPECT_NEAR(squares / kDraws, 1, 0.02);
}

TEST(RandomSource, GivesTheSameNumbersOnEveryMachine) {
  RandomSource random(1, 2);
  EXPECT_EQ(random.bits(), 0xdd7db0ee53f2d246u);
}

TEST(Case, EqualCasesGiveEqualDataAndOtherSeedsOther) {
  LayerCase layer_case = small_case(RouterKind::topk_softmax);
  LayerData const first = make_data(layer_case), second = make_data(layer_case);
  EXPECT_EQ(first.x, second.x);
  EXPECT_EQ(first.w_up, second.w_up);
  EXPECT_EQ(first.w_router, second.w_router);
  layer_case.seed = 8;
  EXPECT_NE(make_data(layer_case).x, first.x);
}

TEST(Case, RedrawLeavesWeightsAlone) {
  LayerCase layer_case = small_case();
  LayerData data = make_data(layer_case);
  LayerData const before = data;
  layer_case.seed = 99;
  redraw_tokens(layer_case, data);
  EXPECT_EQ(data.w_up, before.w_up);
  EXPECT_NE(data.x, before.x);
  EXPECT_EQ(data.scores.size(), before.scores.size());
}

TEST(Pattern, BalancedDiffersByOneAtMost) {
  LayerCase layer_case = small_case();
  layer_case.routing.pattern = RoutingPattern::balanced;
  auto const counts = counts_of(layer_case);
  EXPECT_LE(*std::max_element(counts.begin(), counts.end()) -
                *std::min_element(counts.begin(), counts.end()),
            1);
}

TEST(Pattern, OneExpertIsEveryTokensFirstChoice) {
  LayerCase layer_case = small_case();
  layer_case.routing.pattern = RoutingPattern::one_expert;
  auto const ids = make_slots(layer_case).topk_ids;
  for (std::size_t j = 0; j < ids.size(); j += 2) {
    EXPECT_EQ(ids[j], 0);
    EXPECT_NE(ids[j + 1], 0);
  }
}

TEST(Pattern, OneTokenEachFillsEveryExpertOnce) {
  LayerCase layer_case = small_case();
  layer_case.routing.pattern = RoutingPattern::one_token_each;
  EXPECT_EQ(counts_of(layer_case), std::vector<std::int64_t>(5, 1));
}

TEST(Pattern, EmptyLeavesThatFractionOfExpertsWithoutRows) {
  LayerCase layer_case = small_case();
  layer_case.desc.shape.tokens = 200;
  layer_case.routing = {.pattern = RoutingPattern::empty, .parameter = 0.4};
  auto const counts = counts_of(layer_case);
  EXPECT_EQ(std::count(counts.begin(), counts.end(), 0), 2);
}

TEST(Pattern, ZipfFavoursLowExperts) {
  LayerCase layer_case = small_case();
  layer_case.desc.shape.tokens = 400;
  layer_case.desc.shape.top_k = 1;
  layer_case.routing = {.pattern = RoutingPattern::zipf, .parameter = 2};
  auto const counts = counts_of(layer_case);
  EXPECT_GT(counts[0], 200);
  EXPECT_GT(counts[0], 2 * counts[1]);
}

TEST(Pattern, ShuffledZipfHasTheSamePopularitiesInNoOrder) {
  LayerCase layer_case = small_case();
  layer_case.desc.shape = {
      .tokens = 3000, .hidden = 4, .intermediate = 4, .experts = 16, .top_k = 1};
  layer_case.routing = {.pattern = RoutingPattern::zipf, .parameter = 1.5};
  auto const in_order = counts_of(layer_case);
  layer_case.routing.pattern = RoutingPattern::shuffled_zipf;
  auto const ranks = popularity_ranks(layer_case);
  auto const shuffled = counts_of(layer_case);
  EXPECT_FALSE(std::is_sorted(ranks.begin(), ranks.end()));
  for (std::size_t e = 0; e < ranks.size(); ++e) {
    auto const expected = static_cast<double>(in_order[static_cast<std::size_t>(ranks[e])]);
    EXPECT_NEAR(static_cast<double>(shuffled[e]), expected, 7 * std::sqrt(expected + 1)) << e;
  }
  layer_case.desc.router.kind = RouterKind::topk_softmax;
  auto const bias = make_data(layer_case).b_router;
  layer_case.routing.pattern = RoutingPattern::zipf;
  auto const bias_in_order = make_data(layer_case).b_router;
  for (std::size_t e = 0; e < ranks.size(); ++e) {
    EXPECT_EQ(bias[e], bias_in_order[static_cast<std::size_t>(ranks[e])]) << e;
  }
  layer_case.routing.pattern = RoutingPattern::shuffled_zipf;
  layer_case.seed += 1;
  EXPECT_NE(popularity_ranks(layer_case), ranks);
}

TEST(Pattern, TokensHaveDistinctExpertsUnlessRepeatsAreAskedFor) {
  LayerCase layer_case = small_case();
  layer_case.desc.shape.tokens = 100;
  auto const has_repeat = [](std::vector<std::int64_t> const& ids) {
    bool repeat = false;
    for (std::size_t j = 0; j < ids.size(); j += 2) repeat = repeat || ids[j] == ids[j + 1];
    return repeat;
  };
  EXPECT_FALSE(has_repeat(make_slots(layer_case).topk_ids));
  layer_case.repeat_experts = true;
  EXPECT_TRUE(has_repeat(make_slots(layer_case).topk_ids));
}

TEST(Pattern, ARouterFollowsThePattern) {
  LayerCase layer_case = small_case(RouterKind::topk_softmax);
  layer_case.desc.shape = {
      .tokens = 64, .hidden = 128, .intermediate = 4, .experts = 8, .top_k = 2};
  layer_case.routing = {.pattern = RoutingPattern::empty, .parameter = 0.5};
  std::set<std::int64_t> used;
  for (std::int64_t const id : exact_choice(make_data(layer_case)).topk_ids) used.insert(id);
  EXPECT_EQ(used.size(), 4u);

  layer_case.routing.pattern = RoutingPattern::one_expert;
  auto const ids = exact_choice(make_data(layer_case)).topk_ids;
  std::int64_t first_expert = 0;
  for (std::size_t j = 0; j < ids.size(); j += 2) first_expert += ids[j] == 0 || ids[j + 1] == 0;
  EXPECT_GE(first_expert, 60);
}

TEST(Pattern, SentinelsAreOutsideTheExpertsAndAllOfThemWhenAsked) {
  LayerCase layer_case = small_case();
  layer_case.sentinel_fraction = 1;
  for (std::int64_t const id : make_slots(layer_case).topk_ids) EXPECT_TRUE(id < 0 || id >= 5);
}

TEST(Case, RefusesWhatARouterCannotMake) {
  LayerCase layer_case = small_case(RouterKind::topk_softmax);
  layer_case.sentinel_fraction = 0.5;
  EXPECT_THROW(make_data(layer_case), std::invalid_argument);
  layer_case.sentinel_fraction = 0;
  layer_case.routing.pattern = RoutingPattern::one_token_each;
  EXPECT_THROW(make_data(layer_case), std::invalid_argument);
}

TEST(Storage, RoundsToNearestEven) {
  EXPECT_EQ(round_to(DType::bf16, 1.0f + 0x1p-8f), 1.0f);                // tie, to even
  EXPECT_EQ(round_to(DType::bf16, 1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);  // tie, to even
  EXPECT_EQ(round_to(DType::bf16, 1.0f + 0x1.8p-8f), 1.0f + 0x1p-7f);
  EXPECT_EQ(round_to(DType::fp16, 1.0f + 0x1p-11f), 1.0f);
  EXPECT_EQ(round_to(DType::fp16, 65520.0f), HUGE_VALF);
  EXPECT_EQ(round_to(DType::fp16, 0x1p-24f), 0x1p-24f);  // smallest subnormal
  EXPECT_EQ(round_to(DType::fp16, 0x1p-26f), 0.0f);
  EXPECT_TRUE(std::isnan(round_to(DType::bf16, NAN)));
}

TEST(Storage, PackedValuesComeBack) {
  for (DType const dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    std::vector<float> values = {0.0f, -1.5f, 0x1p-24f, 3.14159f, -65504.0f, HUGE_VALF};
    round_all(dtype, values);
    std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
    pack(dtype, values, bytes.data());
    EXPECT_EQ(unpack(dtype, bytes.data(), values.size()), values);
  }
}

TEST(Names, CommandNamesWhatDiffersFromTheDefaults) {
  LayerCase layer_case = small_case();
  layer_case.desc.layout = {GateUpOrder::blocked, WeightOrientation::transposed, 2};
  layer_case.routing = {.pattern = RoutingPattern::empty, .parameter = 0.25};
  layer_case.sentinel_fraction = 0.3;
  EXPECT_EQ(case_options(layer_case),
            "--tokens 13 --hidden 10 --intermediate 6 --experts 5 --top-k 2 --activation swiglu "
            "--layout transposed-blocked:2 --dtype fp32 --router given --routing empty:0.25 --bias "
            "--sentinels 0.3 --seed 7");
}

}  // namespace
}  // namespace tessera::verify
