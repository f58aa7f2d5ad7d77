// SPDX-License-Identifier: Apache-2.0
#include "verify/random_cases.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "verify/names.hpp"

namespace tessera::verify {
namespace {

class RandomCases : public testing::TestWithParam<std::uint64_t> {
 protected:
  Context context_ = std::move(Context::create()).value();
};

TEST_P(RandomCases, HundredCasesHoldEveryKind) {
  auto const cases = random_cases(context_, 100, GetParam());
  ASSERT_EQ(cases.size(), 100u);
  using Test = std::function<bool(LayerCase const&)>;
  auto const has = [&cases](Test const& test) {
    return std::any_of(cases.begin(), cases.end(),
                       [&test](RandomCase const& c) { return test(c.layer_case); });
  };
  EXPECT_TRUE(has([](auto const& c) { return c.desc.shape.tokens == 0; }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.shape.tokens == 1; }));
  EXPECT_TRUE(
      has([](auto const& c) { return c.desc.shape.top_k == 1 && c.desc.shape.experts > 1; }));
  EXPECT_TRUE(has([](auto const& c) {
    return c.desc.shape.top_k == c.desc.shape.experts && c.desc.shape.top_k > 1;
  }));
  EXPECT_TRUE(has([](auto const& c) { return c.routing.pattern == RoutingPattern::empty; }));
  EXPECT_TRUE(has([](auto const& c) { return c.routing.pattern == RoutingPattern::one_expert; }));
  EXPECT_TRUE(
      has([](auto const& c) { return c.sentinel_fraction > 0 && c.sentinel_fraction < 1; }));
  EXPECT_TRUE(has([](auto const& c) { return c.sentinel_fraction == 1; }));
  EXPECT_TRUE(has([](auto const& c) { return c.padding_fraction > 0; }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.shape.variable_experts; }));
  EXPECT_TRUE(has([](auto const& c) { return c.repeat_experts; }));
  EXPECT_TRUE(has([](auto const& c) {
    return c.desc.ids_dtype == DType::int64 && c.desc.router.kind == RouterKind::given;
  }));
  EXPECT_TRUE(has([](auto const& c) {
    return c.desc.shape.hidden % 64 != 0 && c.desc.shape.intermediate % 64 != 0;
  }));
  EXPECT_TRUE(has([](auto const& c) { return c.gradient_mode == GradientMode::accumulate; }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.router.replay; }));
  for (auto const kind : {Precision::fp8, Precision::mxfp8}) {
    EXPECT_TRUE(has([kind](auto const& c) { return c.desc.precision == kind; }));
  }
  EXPECT_TRUE(has([](auto const& c) { return c.desc.pow2_scales; }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.experts_choose(); }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.rounds_tokens() && c.aux_dlogits; }));
  EXPECT_TRUE(has([](auto const& c) { return c.desc.router_storage() != c.desc.dtype; }));
  EXPECT_TRUE(has([](auto const& c) {  // rounding drops or adds something
    return c.desc.rounds_tokens() && c.desc.router.tile > 1 && c.desc.shape.tokens > 1;
  }));
}

TEST_P(RandomCases, NoPairIsCoveredByLowPrecision) {
  auto cases = random_cases(context_, 100, GetParam());
  std::erase_if(cases, [](RandomCase const& c) { return !c.layer_case.desc.quantises(); });
  EXPECT_EQ(cases.size(), 10u);
  EXPECT_EQ(pair_coverage(context_, cases).covered, 0);
}

TEST_P(RandomCases, AFifthIsLarge) {
  auto const cases = random_cases(context_, 300, GetParam());
  auto const large = std::count_if(cases.begin(), cases.end(), [](RandomCase const& c) {
    return c.layer_case.desc.shape.tokens >= 512 && c.layer_case.desc.shape.experts >= 32;
  });
  EXPECT_GE(large, 60);
}

TEST_P(RandomCases, EveryPairOfOptionsOccursInThreeHundred) {
  auto const coverage = pair_coverage(context_, random_cases(context_, 300, GetParam()));
  EXPECT_EQ(coverage.covered, coverage.possible);
  EXPECT_GT(coverage.possible, 100);
}

TEST_P(RandomCases, TheLibraryServesThemAll) {
  for (auto const& random_case : random_cases(context_, 100, GetParam())) {
    auto const bytes = workspace_bytes(context_, random_case.layer_case.desc, Pass::backward);
    EXPECT_TRUE(bytes.ok()) << bytes.status().text() << '\n'
                            << case_options(random_case.layer_case);
    EXPECT_NO_THROW(make_slots(random_case.layer_case));
  }
}

TEST_P(RandomCases, EqualSeedsGiveEqualCases) {
  auto const a = random_cases(context_, 30, GetParam()), b = random_cases(context_, 30, GetParam());
  auto const c = random_cases(context_, 30, GetParam() + 1);
  bool differs = false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(case_options(a[i].layer_case), case_options(b[i].layer_case));
    differs = differs || case_options(a[i].layer_case) != case_options(c[i].layer_case);
  }
  EXPECT_TRUE(differs);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomCases, testing::Values(0u, 1u, 42u, 0xffffffffffffffffu));

}  // namespace
}  // namespace tessera::verify
