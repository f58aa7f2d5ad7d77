// SPDX-License-Identifier: Apache-2.0
// Selection rules: descending logits, ties to the lower id, NaN above all; scores are softmax of the chosen.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct Routed {
  std::vector<std::int64_t> ids;
  Floats weights, logits;
};

/// Routes with hidden = experts and an identity router: the logits are x.
Routed route_logits(Floats const& x, std::int64_t experts, std::int64_t top_k, float scale = 1) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  std::int64_t const tokens = static_cast<std::int64_t>(x.size()) / experts;
  MoeDesc desc;
  desc.shape = {
      .tokens = tokens, .hidden = experts, .intermediate = 4, .experts = experts, .top_k = top_k};
  desc.router.kind = RouterKind::topk_softmax;
  desc.router.route_scale = scale;
  desc.ids_dtype = DType::int64;
  Floats identity(static_cast<std::size_t>(experts * experts), 0.0f);
  for (std::int64_t e = 0; e < experts; ++e)
    identity[static_cast<std::size_t>(e * experts + e)] = 1;
  Routed out;
  out.ids.resize(static_cast<std::size_t>(tokens * top_k));
  out.weights.resize(out.ids.size());
  out.logits.resize(x.size());
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::route)));
  RouteArgs args;
  args.x = tensor(x.data(), {tokens, experts});
  args.w_router = tensor(identity.data(), {experts, experts});
  args.topk_ids = tensor(out.ids.data(), {tokens, top_k});
  args.topk_weights = tensor(out.weights.data(), {tokens, top_k});
  args.logits = tensor(out.logits.data(), {tokens, experts});
  args.workspace = {workspace.data(), workspace.size()};
  Status const status = route(context, desc, args);
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}

using Ids = std::vector<std::int64_t>;

TEST(Route, OrdersByLogitThenId) {
  EXPECT_EQ(route_logits({1, 3, 2, 3}, 4, 3).ids, (Ids{1, 3, 2}));
  EXPECT_EQ(route_logits({0, 0, 0, 0}, 4, 4).ids, (Ids{0, 1, 2, 3}));
  EXPECT_EQ(route_logits({-1, -3, -2, -2}, 4, 4).ids, (Ids{0, 2, 3, 1}));
}

TEST(Route, ScoresAreTheSoftmaxOfTheChosen) {
  Routed const routed = route_logits({0.5f, -1.0f, 2.0f, 1.0f}, 4, 2, 3.0f);
  EXPECT_EQ(routed.ids, (Ids{2, 3}));
  double const q = 1.0 / (1.0 + std::exp(-1.0));
  EXPECT_NEAR(routed.weights[0], 3.0 * q, 1e-6);
  EXPECT_NEAR(routed.weights[1], 3.0 * (1.0 - q), 1e-6);
  EXPECT_EQ(routed.logits, (Floats{0.5f, -1.0f, 2.0f, 1.0f}));
}

TEST(Route, OneChosenExpertHasTheScoreOne) {
  Routed const routed = route_logits({5, 1, 1, 7}, 2, 1);
  EXPECT_EQ(routed.ids, (Ids{0, 1}));
  EXPECT_EQ(routed.weights, (Floats{1, 1}));
}

TEST(Route, NanRanksHighestAndIdsStayDistinct) {
  Routed const routed = route_logits({std::nanf(""), 1, 2, 3}, 4, 3);
  // NaN spreads to every logit of its token through the GEMM: ties, so ids ascend.
  EXPECT_EQ(routed.ids, (Ids{0, 1, 2}));
  for (float const weight : routed.weights) EXPECT_TRUE(std::isnan(weight));
}

TEST(Route, SelectionBiasMovesTheChoiceNotTheScore) {
  Context const context = value_of(Context::create({.num_threads = 1}));
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 3, .top_k = 1};
  desc.router.kind = RouterKind::topk_softmax;
  float const x = 1, w_router[3] = {3, 2, 1}, bias[3] = {0, 0, 10};
  std::int32_t id = -1;
  float weight = 0;
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::route)));
  RouteArgs args;
  args.x = tensor(&x, {1, 1});
  args.w_router = tensor(w_router, {3, 1});
  args.selection_bias = tensor(bias, {3});
  args.topk_ids = tensor(&id, {1, 1});
  args.topk_weights = tensor(&weight, {1, 1});
  args.workspace = {workspace.data(), workspace.size()};
  ASSERT_TRUE(route(context, desc, args).ok());
  EXPECT_EQ(id, 2);
  EXPECT_EQ(weight, 1.0f);
}

TEST(Route, AgreesWithTheLayerBitForBit) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  Layer layer(context, small_desc(RouterKind::topk_softmax));
  ASSERT_TRUE(layer.run_forward().ok());
  auto const& s = layer.desc.shape;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(layer.desc.num_slots()));
  Floats weights(ids.size());
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, layer.desc, Pass::route)));
  RouteArgs args;
  args.x = layer.forward.x;
  args.w_router = layer.forward.w_router;
  args.b_router = layer.forward.b_router;
  args.topk_ids = tensor(ids.data(), {s.tokens, s.top_k});
  args.topk_weights = tensor(weights.data(), {s.tokens, s.top_k});
  args.workspace = {workspace.data(), workspace.size()};
  ASSERT_TRUE(route(context, layer.desc, args).ok());
  RoutingView const tables = layer.tables();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(ids[i], tables.topk_ids[i]);
    EXPECT_EQ(weights[i], tables.scores[i]);
  }
}

}  // namespace
}  // namespace tessera::api_test
