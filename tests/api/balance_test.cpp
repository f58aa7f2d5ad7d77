// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses against numbers worked out by hand and finite differences; the bias update; load statistics.
#include "tessera/balance.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <type_traits>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct Losses {
  float balance = NAN, z = NAN;
  Floats dlogits;
};

struct BalanceTest : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));

  static MoeDesc desc_of(RouterKind kind, std::int64_t tokens, std::int64_t experts) {
    MoeDesc desc = small_desc(kind);
    desc.shape.tokens = tokens;
    desc.shape.experts = experts;
    return desc;
  }

  template <class Count = std::int32_t>
  Losses losses(Floats const& logits, std::vector<std::type_identity_t<Count>> const& counts,
                RouterLossArgs args, RouterKind kind = RouterKind::topk_softmax) {
    auto const experts = static_cast<std::int64_t>(counts.size());
    auto const tokens = static_cast<std::int64_t>(logits.size()) / experts;
    MoeDesc const desc = desc_of(kind, tokens, experts);
    std::vector<std::byte> workspace(value_of(router_loss_workspace_bytes(context, desc)),
                                     std::byte{0xff});
    Losses out;
    Floats values(2, NAN);
    out.dlogits.assign(logits.size(), NAN);
    args.logits = tensor(logits.data(), {tokens, experts});
    args.topk_counts = tensor(counts.data(), {experts});
    args.losses = tensor(values.data(), {2});
    args.dlogits = tensor(out.dlogits.data(), {tokens, experts});
    args.workspace = {workspace.data(), workspace.size()};
    Status const status = router_loss(context, desc, args);
    EXPECT_TRUE(status.ok()) << status.text();
    out.balance = values[0];
    out.z = values[1];
    return out;
  }
};

TEST_F(BalanceTest, CountsWithoutItsCoefficientChangeNoBit) {
  std::mt19937 generator(3);
  Floats const logits = random_floats(7 * 4, 1, generator);
  for (RouterKind const kind : {RouterKind::topk_softmax, RouterKind::sigmoid_bias}) {
    Losses const none = losses(logits, {0, 0, 0, 0}, {.z = 0.1f}, kind);
    for (std::vector<std::int32_t> const& counts : {std::vector{3, 1, 9, 1}, {1 << 30, 0, 0, 1}}) {
      Losses const given = losses(logits, counts, {.z = 0.1f}, kind);
      EXPECT_EQ(given.balance, 0);
      EXPECT_EQ(given.z, none.z);
      EXPECT_EQ(given.dlogits, none.dlogits);
      EXPECT_NE(losses(logits, counts, {.balance = 0.1f, .z = 0.1f}, kind).dlogits, none.dlogits);
    }
  }
}

TEST_F(BalanceTest, IsItsCoefficientWhereTheLoadIsBalanced) {
  EXPECT_NEAR(losses(Floats(12, 0.5f), {2, 2, 2, 2}, {.balance = 0.3f}).balance, 0.3f, 1e-6f);
  EXPECT_NEAR(losses({50, 0, 0, 0, 50, 0, 0, 0}, {2, 0, 0, 0}, {.balance = 0.3f}).balance, 1.2f,
              1e-6f);
  EXPECT_NEAR(
      losses({50, 0, 0, 0, 50, 0, 0, 0}, {2, 0, 0, 0}, {.balance = 0.3f}, RouterKind::sigmoid_bias)
          .balance,
      0.3f * 4 / 2.5f, 1e-5f);  // sigmoids 1, 1/2, 1/2, 1/2
}

TEST_F(BalanceTest, ZLossIsTheMeanSquareOfLogSumExp) {
  double const lse[] = {std::log(2.0) + 1, std::log(std::exp(3.0) + std::exp(-2.0))};
  EXPECT_NEAR(losses({1, 1, 3, -2}, {1, 1}, {.z = 0.5f}).z,
              0.25f * static_cast<float>(lse[0] * lse[0] + lse[1] * lse[1]), 1e-5f);
}

TEST_F(BalanceTest, GradientsAgreeWithFiniteDifferences) {
  constexpr std::int64_t kExperts = 5;
  std::mt19937 generator(3);
  Floats const logits = random_floats(7 * kExperts, 1, generator);
  std::vector<std::int32_t> const counts = {5, 0, 3, 4, 2};
  for (RouterKind const kind :
       {RouterKind::topk_softmax, RouterKind::softmax_topk, RouterKind::sigmoid_bias,
        RouterKind::sqrtsoftplus, RouterKind::expert_choice}) {
    for (RouterLossArgs const& args : {RouterLossArgs{.balance = 7}, RouterLossArgs{.z = 3},
                                       RouterLossArgs{.balance = 2, .z = 1, .d_loss = -0.5f}}) {
      Floats const gradient = losses(logits, counts, args, kind).dlogits;
      for (std::size_t i = 0; i < logits.size(); ++i) {
        constexpr float kStep = 1e-2f;
        Floats above = logits, below = logits;
        above[i] += kStep;
        below[i] -= kStep;
        Losses const high = losses(above, counts, args, kind),
                     low = losses(below, counts, args, kind);
        double const difference =
            (static_cast<double>(high.balance) - static_cast<double>(low.balance)) +
            (static_cast<double>(high.z) - static_cast<double>(low.z));
        double const measured = static_cast<double>(args.d_loss) * difference /
                                static_cast<double>(above[i] - below[i]);
        EXPECT_NEAR(measured, static_cast<double>(gradient[i]), 5e-4)
            << i << " router " << static_cast<int>(kind);
      }
    }
  }
}

TEST_F(BalanceTest, PartsOfAScopeAddUpToTheWhole) {
  std::mt19937 generator(4);
  Floats const logits = random_floats(600 * 3, 1, generator);
  Floats const first(logits.begin(), logits.begin() + 300),
      rest(logits.begin() + 300, logits.end());
  RouterLossArgs const args{.scope_tokens = 600, .balance = 1, .z = 0.1f};
  Losses const whole = losses(logits, {700, 300, 200}, {.balance = 1, .z = 0.1f});
  Losses const a = losses(first, {700, 300, 200}, args), b = losses(rest, {700, 300, 200}, args);
  EXPECT_NEAR(a.balance + b.balance, whole.balance, 1e-6f);
  EXPECT_NEAR(a.z + b.z, whole.z, 1e-6f);
  EXPECT_EQ(a.dlogits[7], whole.dlogits[7]);
  EXPECT_EQ(b.dlogits[7], whole.dlogits[307]);
}

TEST_F(BalanceTest, TakesMeansAndSharesForCounts) {
  std::mt19937 generator(6);
  Floats const logits = random_floats(40 * 5, 1, generator);
  std::vector<std::int32_t> const counts = {31, 0, 17, 9, 23};
  Losses const whole = losses(logits, counts, {.balance = 1});
  EXPECT_GT(whole.balance, 0.5f);
  Floats const same(counts.begin(), counts.end());
  Losses const as_floats = losses<float>(logits, same, {.balance = 1});
  EXPECT_EQ(as_floats.balance, whole.balance);
  EXPECT_EQ(as_floats.dlogits, whole.dlogits);
  for (float const divisor : {3.0f, 40.0f, 1e20f, 1e-20f}) {
    Floats parts;
    for (std::int32_t const count : counts) parts.push_back(static_cast<float>(count) / divisor);
    Losses const got = losses<float>(logits, parts, {.balance = 1});
    EXPECT_NEAR(got.balance, whole.balance, 4e-7f) << divisor;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      EXPECT_NEAR(got.dlogits[i], whole.dlogits[i], 1e-8f) << divisor;
    }
  }
  EXPECT_EQ(losses<float>(logits, {0, -0.0f, 0, 0, 0}, {.balance = 1}).balance, 0);
}

TEST_F(BalanceTest, RefusesCountsThatAreNone) {
  MoeDesc const desc = desc_of(RouterKind::topk_softmax, 1, 3);
  Floats const logits(3, 1.0f);
  std::vector<std::byte> workspace(value_of(router_loss_workspace_bytes(context, desc)));
  struct Bad {
    float count;
    char const* text;
  };
  for (Bad const& bad :
       {Bad{-0.5f, "topk_counts[1]=-0.5"}, Bad{NAN, "topk_counts[1]=nan"},
        Bad{INFINITY, "topk_counts[1]=inf"}, Bad{-INFINITY, "topk_counts[1]=-inf"}}) {
    Floats const counts = {1, bad.count, NAN};
    Floats bias(3, 2.0f);
    RouterLossArgs args{.logits = tensor(logits.data(), {1, 3}),
                        .topk_counts = tensor(counts.data(), {3})};
    args.workspace = {workspace.data(), workspace.size()};
    for (Status const& status :
         {router_loss(context, desc, args),
          update_selection_bias(context, {.topk_counts = args.topk_counts,
                                          .selection_bias = tensor(bias.data(), {3})})}) {
      EXPECT_EQ(status.code(), StatusCode::invalid_argument);
      EXPECT_NE(std::string(status.text()).find(bad.text), std::string::npos) << status.text();
    }
    EXPECT_EQ(bias, Floats(3, 2.0f));
  }
}

TEST_F(BalanceTest, IsZeroWithoutTokensOrCounts) {
  Losses const nothing = losses({}, {0, 0, 0}, {.balance = 1, .z = 1});
  EXPECT_EQ(nothing.balance, 0);
  EXPECT_EQ(nothing.z, 0);
  EXPECT_EQ(losses({1, 2, 3}, {0, 0, 0}, {.balance = 1}).balance, 0);
}

TEST_F(BalanceTest, RefusesWhatDoesNotFit) {
  MoeDesc const desc = desc_of(RouterKind::topk_softmax, 2, 3);
  Floats const logits(6, 1.0f);
  std::vector<std::int32_t> counts = {1, -1, 2};
  std::vector<std::byte> workspace(value_of(router_loss_workspace_bytes(context, desc)));
  auto const refuse = [&](char const* part, std::function<void(RouterLossArgs&)> const& change) {
    RouterLossArgs args{.logits = tensor(logits.data(), {2, 3})};
    args.workspace = {workspace.data(), workspace.size()};
    change(args);
    Status const status = router_loss(context, desc, args);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
  };
  refuse("logits", [](RouterLossArgs& args) { args.logits.shape[1] = 4; });
  refuse("topk_counts", [](RouterLossArgs& args) { args.balance = 1; });
  refuse("topk_counts[1]=-1",
         [&](RouterLossArgs& args) { args.topk_counts = tensor(counts.data(), {3}); });
  refuse("balance=nan", [](RouterLossArgs& args) { args.balance = NAN; });
  refuse("scope_tokens=-1", [](RouterLossArgs& args) { args.scope_tokens = -1; });
  refuse("workspace", [](RouterLossArgs& args) { args.workspace.bytes = 1; });
  EXPECT_EQ(router_loss(context, small_desc(), {}).code(), StatusCode::invalid_argument);
}

TEST_F(BalanceTest, BiasMovesTowardsTheMean) {
  Floats bias = {1, 1, 1, 1};
  std::vector<std::int64_t> const counts = {5, 2, 3, 2};  // mean 3
  SelectionBiasArgs args{.topk_counts = tensor(counts.data(), {4}),
                         .selection_bias = tensor(bias.data(), {4}),
                         .rate = 0.5f};
  ASSERT_TRUE(update_selection_bias(context, args).ok());
  EXPECT_EQ(bias, (Floats{0.5f, 1.5f, 1, 1.5f}));
  bias = {1, 1, 1, 1};
  args.subtract_mean = true;
  ASSERT_TRUE(update_selection_bias(context, args).ok());
  EXPECT_EQ(bias, (Floats{0.375f, 1.375f, 0.875f, 1.375f}));
  // Thirds, and counts that are far smaller.
  for (float const divisor : {3.0f, 3e30f}) {
    Floats const parts = {7 / divisor, 1 / divisor, 4 / divisor, 4 / divisor};
    Floats moved = {1, 1, 1, 1};
    ASSERT_TRUE(update_selection_bias(context, {.topk_counts = tensor(parts.data(), {4}),
                                                .selection_bias = tensor(moved.data(), {4}),
                                                .rate = 0.5f})
                    .ok());
    EXPECT_EQ(moved[0], 0.5f);
    EXPECT_EQ(moved[1], 1.5f);
  }
  Floats const equal(4, 1 / 3.0f);
  args.topk_counts = tensor(equal.data(), {4});
  ASSERT_TRUE(update_selection_bias(context, args).ok());
  EXPECT_EQ(bias, (Floats{0.375f, 1.375f, 0.875f, 1.375f}));
  std::vector<std::int64_t> const none(4, 0);
  args.topk_counts = tensor(none.data(), {4});
  ASSERT_TRUE(update_selection_bias(context, args).ok());
  EXPECT_EQ(bias[0], 0.375f);
  args.rate = NAN;
  EXPECT_EQ(update_selection_bias(context, args).code(), StatusCode::invalid_argument);
}

TEST_F(BalanceTest, BiasAndLossBalanceARouterThatFavoursOneExpert) {
  // Selection by bias: every token prefers expert 0, until the bias has moved.
  constexpr std::int64_t kTokens = 200, kExperts = 4;
  MoeDesc desc = desc_of(RouterKind::sigmoid_bias, kTokens, kExperts);
  desc.shape.top_k = 1;
  desc.shape.hidden = kExperts;
  std::mt19937 generator(5);
  Floats x = random_floats(kTokens * kExperts, 0.5f, generator), identity(16, 0.0f), bias(4, 0.0f);
  for (std::size_t e = 0; e < 4; ++e) identity[e * 5] = 1;
  for (std::size_t t = 0; t < kTokens; ++t) x[t * 4] += 2;
  std::vector<std::int32_t> ids(kTokens);
  Floats weights(kTokens);
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::route)));
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    RouteArgs args;
    args.x = tensor(x.data(), {kTokens, kExperts});
    args.w_router = tensor(identity.data(), {kExperts, kExperts});
    args.selection_bias = tensor(bias.data(), {kExperts});
    args.topk_ids = tensor(ids.data(), {kTokens, 1});
    args.topk_weights = tensor(weights.data(), {kTokens, 1});
    args.workspace = {workspace.data(), workspace.size()};
    ASSERT_TRUE(route(context, desc, args).ok());
    std::vector<std::int32_t> counts(kExperts, 0);
    for (std::int32_t const id : ids) ++counts[static_cast<std::size_t>(id)];
    last = load_statistics(counts).max_over_mean;
    if (step == 0) first = last;
    ASSERT_TRUE(update_selection_bias(context, {.topk_counts = tensor(counts.data(), {kExperts}),
                                                .selection_bias = tensor(bias.data(), {kExperts}),
                                                .rate = 0.01f})
                    .ok());
  }
  EXPECT_GT(first, 3.5);
  EXPECT_LT(last, 1.3);
}

TEST(LoadStatistics, OfKnownCounts) {
  LoadStatistics const load = load_statistics(std::vector<std::int32_t>{6, 0, 2, 0});
  EXPECT_EQ(load.rows, 8);
  EXPECT_EQ(load.empty, 2);
  EXPECT_EQ(load.most, 6);
  EXPECT_EQ(load.fewest, 0);
  EXPECT_EQ(load.max_over_mean, 3);
  EXPECT_NEAR(load.coefficient_of_variation, std::sqrt(6.0) / 2, 1e-12);
  EXPECT_EQ(load_statistics(std::vector<std::int64_t>{0, 0}).max_over_mean, 0);
  EXPECT_EQ(load_statistics(std::vector<std::int64_t>{3, 3}).coefficient_of_variation, 0);
}

}  // namespace
}  // namespace tessera::api_test
