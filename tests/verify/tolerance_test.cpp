// SPDX-License-Identifier: Apache-2.0
#include "verify/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/verify/support.hpp"
#include "verify/naive_rounding.hpp"
#include "verify/names.hpp"

namespace tessera::verify {
namespace {

constexpr double kUnit = 0x1p-8;

/// 128 elements of size 1 in two groups of 64, with a naive that is off by 0.01 everywhere.
struct Judged {
  std::vector<double> ref = std::vector<double>(128, 1.0);
  std::vector<float> naive = std::vector<float>(128, 1.01f);
  std::vector<float> out = std::vector<float>(128, 1.0f);
  Grouping grouping{.order = {}, .group_ends = {64, 128}, .exact = {}, .exempt = {}};
  [[nodiscard]] Comparison verdict() const { return compare(ref, {&naive}, out, grouping, kUnit); }
};

TEST(Tolerance, AcceptsTwiceTheNaiveErrorAndTheRoundingFloor) {
  Judged judged;
  judged.out.assign(128, static_cast<float>(1 + 0.02 + 0.9 * kUnit));
  EXPECT_TRUE(judged.verdict().ok);
  EXPECT_GT(judged.verdict().worst_row_ratio, 0.9);
  judged.out.assign(128, static_cast<float>(1 + 0.02 + 1.2 * kUnit));
  EXPECT_FALSE(judged.verdict().ok);
  EXPECT_GT(judged.verdict().worst_row_ratio, 1);
}

TEST(Tolerance, OneBadGroupIsEnough) {
  Judged judged;
  for (int i = 64; i < 128; ++i) judged.out[i] = 1.05f;
  Comparison const result = judged.verdict();
  EXPECT_FALSE(result.ok);
  EXPECT_LT(result.rel_error, 0.05);
}

TEST(Tolerance, OneBadElementIsEnough) {
  Judged judged;
  judged.out[77] = 1.06f;  // its norm hides in the group's, its size does not
  EXPECT_LE(judged.verdict().worst_row_ratio, 1);
  EXPECT_FALSE(judged.verdict().ok);
}

TEST(Tolerance, NanInfinityAndMissingElementsFail) {
  for (float const bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF}) {
    Judged judged;
    judged.out[3] = bad;
    EXPECT_FALSE(judged.verdict().ok);
    EXPECT_TRUE(std::isfinite(judged.verdict().worst_row_ratio));
    EXPECT_TRUE(std::isfinite(judged.verdict().rel_error));
  }
  Judged judged;
  judged.out.pop_back();
  EXPECT_FALSE(judged.verdict().ok);
}

TEST(Tolerance, WhatIsZeroByDefinitionMustBeExactlyZero) {
  Judged judged;
  judged.grouping.exact.assign(128, 0);
  judged.grouping.exact[5] = 1;
  judged.ref[5] = 0;
  judged.naive[5] = 0;
  judged.out[5] = 0;
  EXPECT_TRUE(judged.verdict().ok);
  judged.out[5] = 1e-20f;
  EXPECT_FALSE(judged.verdict().ok);
}

TEST(Tolerance, SmallGroupsJoinUntilTheyHold64FreeElements) {
  Judged judged;
  judged.grouping.group_ends.clear();
  for (int end = 1; end <= 128; ++end) judged.grouping.group_ends.push_back(end);
  judged.naive[0] = 1.0f;  // alone, this element would allow nothing but the floor
  judged.out[0] = 1.01f;
  EXPECT_TRUE(judged.verdict().ok);
}

TEST(Tolerance, ExemptElementsDoNotCount) {
  Judged judged;
  judged.out[9] = 100;
  EXPECT_FALSE(judged.verdict().ok);
  judged.grouping.exempt.assign(128, 0);
  judged.grouping.exempt[9] = 1;
  EXPECT_TRUE(judged.verdict().ok);
}

TEST(Tolerance, NothingEqualsNothing) {
  Judged judged;
  judged.ref.clear(), judged.naive.clear(), judged.out.clear();
  judged.grouping.group_ends.clear();
  EXPECT_TRUE(judged.verdict().ok);
  EXPECT_EQ(judged.verdict().rel_error, 0);
}

/// The naive path, judged as if it were a candidate.
Comparisons judge_naive(LayerCase const& layer_case, std::uint64_t sample) {
  LayerData const data = make_data(layer_case);
  auto const inputs = reference_inputs(data, exact_choice(data));
  auto const forward = reference::forward(inputs);
  auto const backward =
      reference::backward(inputs, forward, reference::Values(data.d_o.begin(), data.d_o.end()));
  auto const ref = reference_tensors(data, forward, backward);
  auto const naives =
      naive_samples(std::move(Context::create()).value(), data, inputs, forward.metadata);
  return judge(data, inputs, forward, ref, naives,
               naive_tensors(data, inputs, forward.metadata, sample));
}

TEST(Tolerance, AcceptsTheNaivePathInEveryTypeAndSample) {
  for (DType const dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    for (RouterKind const router : {RouterKind::given, RouterKind::topk_softmax}) {
      for (std::uint64_t const sample : {0, 77}) {
        SCOPED_TRACE(name_of(kDTypeNames, dtype));
        LayerCase layer_case = small_case(router);
        layer_case.desc.shape = {
            .tokens = 48, .hidden = 40, .intermediate = 24, .experts = 6, .top_k = 2};
        layer_case.desc.dtype = dtype;
        layer_case.gradient_mode = GradientMode::accumulate;
        auto const results = judge_naive(layer_case, sample);
        for (auto const& [name, result] : results)
          EXPECT_TRUE(result.ok) << name << ' ' << result.reason;
        EXPECT_EQ(results.contains("dlogits"), router != RouterKind::given);
      }
    }
  }
}

TEST(Tolerance, KinksExemptTheirRowsOnly) {
  LayerCase layer_case = small_case();
  layer_case.desc.activation.kind = ActivationKind::relu;
  LayerData data = make_data(layer_case);
  auto const inputs = reference_inputs(data);
  auto forward = reference::forward(inputs);
  forward.h_up[0] = 1e-7;  // row 0, i = 0
  auto const groups = groupings(data, inputs, forward);
  std::int64_t const token = forward.metadata.gather_index[0];
  auto const& dx = groups.at("dx").exempt;
  ASSERT_FALSE(dx.empty());
  EXPECT_EQ(std::count(dx.begin(), dx.end(), 1), 10);
  EXPECT_EQ(dx[token * 10], 1);
  EXPECT_EQ(groups.at("dw_up").exempt[0], 1);
  EXPECT_EQ(groups.at("db_up").exempt[0], 1);
  EXPECT_TRUE(groups.at("o").exempt.empty());
}

// In 16 bits other orders of the same fp32 sums mostly round alike; errors drawn anew do not.
TEST(NaiveSamples, RoundIn16BitsInMoreThanOneWay) {
  LayerCase layer_case = small_case();
  layer_case.desc.dtype = DType::bf16;
  LayerData const data = make_data(layer_case);
  auto const inputs = reference_inputs(data);
  Context const context = std::move(Context::create({.num_threads = 1})).value();
  auto const naives = naive_samples(context, data, inputs, reference::forward(inputs).metadata);
  auto const& first = naives.front().at("o");
  std::size_t settled = 0;  // elements on which all samples agree
  for (std::size_t i = 0; i < first.size(); ++i) {
    settled += std::all_of(naives.begin(), naives.end(),
                           [&](Tensors const& naive) { return naive.at("o")[i] == first[i]; });
  }
  EXPECT_EQ(settled, 0);
}

// A rounding's error is uniform within half a spacing: its root mean square is spacing / sqrt(12).
TEST(NaiveRounding, DrawsErrorsOfTheSizeThatRoundingHas) {
  for (DType const dtype : {DType::bf16, DType::fp16}) {
    NaiveRounding to_nearest(dtype, 0), drawn(dtype, 1);
    constexpr int kCount = 4000;
    double squares_of_nearest = 0, squares_of_drawn = 0, sum = 0;
    for (int i = 0; i < kCount; ++i) {
      float const value = -1.0f - static_cast<float>(i) / 4001;  // one binade, never on the grid
      double const half = spacing_at(dtype, value) / 2;
      EXPECT_EQ(to_nearest(value), round_to(dtype, value));
      double const error = (static_cast<double>(drawn(value)) - value) / half;
      EXPECT_LE(std::abs(error), 1.001);
      sum += error;
      squares_of_drawn += error * error;
      double const nearest = (static_cast<double>(to_nearest(value)) - value) / half;
      EXPECT_LE(std::abs(nearest), 1);
      squares_of_nearest += nearest * nearest;
    }
    EXPECT_NEAR(squares_of_drawn / squares_of_nearest, 1, 0.1);
    EXPECT_NEAR(sum / kCount, 0, 0.05);
  }
}

TEST(NaiveRounding, LeavesWhatTheTypeHolds) {
  for (float const value : {0.0f, 1.0f, -0.75f, 96.0f, HUGE_VALF}) {
    for (DType const dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      NaiveRounding drawn(dtype, 5);
      EXPECT_EQ(drawn(value), value);
    }
  }
  NaiveRounding fp32(DType::fp32, 5), bf16(DType::bf16, 5);
  EXPECT_EQ(fp32(0.1f), 0.1f);
  EXPECT_NE(bf16(0.1f), 0.1f);
  EXPECT_TRUE(std::isnan(bf16(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace tessera::verify
