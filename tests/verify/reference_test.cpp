// SPDX-License-Identifier: Apache-2.0
// The reference against numbers worked out by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/reference/activation.hpp"
#include "cpu/reference/layer.hpp"

namespace tessera::reference {
namespace {

/// One token, d = 2, n = 1, two experts, both chosen; relu2, so that all numbers are short.
Inputs tiny() {
  Inputs inputs;
  inputs.desc.shape = {.tokens = 1, .hidden = 2, .intermediate = 1, .experts = 2, .top_k = 2};
  inputs.desc.activation.kind = ActivationKind::relu2;
  inputs.desc.bias = true;
  inputs.x = {1, 2};
  inputs.topk_ids = {1, 0};
  inputs.scores = {0.5, 2};
  inputs.weights.w_up = {1, 1, 2, -0.5};  // h: expert 0: 3 + 1, expert 1: 1 - 3
  inputs.weights.b_up = {1, 1};
  inputs.weights.w_down = {1, -1, 3, 4};  // [E,d,n]
  inputs.weights.b_down = {0.5, 0, 0, 0.25};
  return inputs;
}

TEST(Reference, ForwardOfATinyLayer) {
  Forward const f = forward(tiny());
  EXPECT_EQ(f.h_up, (Values{4, 2}));
  EXPECT_EQ(f.a, (Values{16, 4}));
  EXPECT_EQ(f.y, (Values{16.5, -16, 12, 16.25}));
  EXPECT_EQ(f.o, (Values{0.5 * 12 + 2 * 16.5, 0.5 * 16.25 - 2 * 16}));
}

TEST(Reference, BackwardOfATinyLayer) {
  Inputs const inputs = tiny();
  Backward const b = backward(inputs, forward(inputs), {1, 10});
  // dA' = dO D: expert 0: 1 - 10, expert 1: 3 + 40; ds = dA' a + dO b_down, by slot.
  EXPECT_EQ(b.dscores, (Values{43 * 4 + 2.5, -9 * 16 + 0.5}));
  EXPECT_EQ(b.dh_up, (Values{2 * -9 * 8, 0.5 * 43 * 4}));
  EXPECT_EQ(b.a_scaled, (Values{32, 2}));
  EXPECT_EQ(b.dx, (Values{-144 * 1 + 86 * 2, -144 * 1 - 86 * 0.5}));
  EXPECT_EQ(b.gradients.w_up, (Values{-144, -288, 86, 172}));
  EXPECT_EQ(b.gradients.b_up, (Values{-144, 86}));
  EXPECT_EQ(b.gradients.w_down, (Values{32, 320, 2, 20}));
  EXPECT_EQ(b.gradients.b_down, (Values{2, 20, 0.5, 5}));
}

TEST(Reference, SentinelsAddNothingWhateverTheirScore) {
  Inputs inputs = tiny();
  inputs.topk_ids = {2, 0};
  inputs.scores[0] = NAN;
  Forward const f = forward(inputs);
  EXPECT_EQ(f.o, (Values{33, -32}));
  Backward const b = backward(inputs, f, {1, 10});
  EXPECT_EQ(b.dscores[0], 0);
  EXPECT_EQ(b.gradients.w_down, (Values{32, 320, 0, 0}));
}

TEST(Reference, MetadataIsStableAndKeepsSentinelsOut) {
  MoeDesc desc;
  desc.shape = {.tokens = 3, .hidden = 1, .intermediate = 1, .experts = 3, .top_k = 2};
  Metadata const m = metadata(desc, {2, 0, 0, -1, 2, 7}, {});
  EXPECT_EQ(m.expert_offsets, (std::vector<std::int64_t>{0, 2, 2, 4}));
  EXPECT_EQ(m.sort_permutation, (std::vector<std::int64_t>{1, 2, 0, 4, -1, -1}));
  EXPECT_EQ(m.gather_index, (std::vector<std::int64_t>{0, 1, 0, 2, 0, 0}));
  EXPECT_EQ(m.inverse_permutation, (std::vector<std::int64_t>{2, 0, 1, -1, 3, -1}));
  EXPECT_EQ(m.token_offsets, (std::vector<std::int64_t>{0, 2, 4, 6}));
}

TEST(Reference, MetadataOfVariableCounts) {
  MoeDesc desc;
  desc.shape = {.tokens = 3,
                .hidden = 1,
                .intermediate = 1,
                .experts = 2,
                .top_k = 1,
                .slots = 3,
                .variable_experts = true};
  Metadata const m = metadata(desc, {1, 0, 1}, {0, 2, 2, 3});
  EXPECT_EQ(m.gather_index, (std::vector<std::int64_t>{0, 0, 2}));
  EXPECT_EQ(m.inverse_permutation, (std::vector<std::int64_t>{1, 0, 2}));
}

TEST(Reference, EveryLayoutHoldsTheSameWeights) {
  LogicalWeights logical;
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 3, .intermediate = 4, .experts = 2, .top_k = 1};
  desc.bias = true;
  logical = zero_weights(desc);
  double next = 0;
  for (Values* const values : {&logical.gate, &logical.up, &logical.down, &logical.b_gate,
                               &logical.b_up, &logical.b_down}) {
    for (double& value : *values) value = ++next;
  }
  for (WeightOrientation const orientation :
       {WeightOrientation::rows, WeightOrientation::transposed, WeightOrientation::separate}) {
    for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::up_first,
                                    GateUpOrder::interleaved, GateUpOrder::blocked}) {
      desc.layout = {order, orientation, order == GateUpOrder::blocked ? 2 : 0};
      LogicalWeights const back = logical_weights(desc, stored_weights(desc, logical));
      EXPECT_EQ(back.gate, logical.gate);
      EXPECT_EQ(back.up, logical.up);
      EXPECT_EQ(back.down, logical.down);
      EXPECT_EQ(back.b_gate, logical.b_gate);
      EXPECT_EQ(back.b_down, logical.b_down);
    }
  }
}

TEST(Reference, LayoutsStandWhereTheyShould) {
  MoeDesc desc;
  desc.shape.intermediate = 8;
  desc.layout.order = GateUpOrder::concat;
  EXPECT_EQ(stored_row(desc, Part::gate, 3), 3);
  EXPECT_EQ(stored_row(desc, Part::up, 3), 11);
  desc.layout.order = GateUpOrder::up_first;
  EXPECT_EQ(stored_row(desc, Part::gate, 3), 11);
  EXPECT_EQ(stored_row(desc, Part::up, 3), 3);
  desc.layout.order = GateUpOrder::interleaved;
  EXPECT_EQ(stored_row(desc, Part::gate, 3), 6);
  EXPECT_EQ(stored_row(desc, Part::up, 3), 7);
  desc.layout = {GateUpOrder::blocked, WeightOrientation::rows, 4};
  EXPECT_EQ(stored_row(desc, Part::gate, 5), 9);
  EXPECT_EQ(stored_row(desc, Part::up, 5), 13);
}

TEST(Reference, TransposedSwapsTheMatrixDimensions) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 2, .intermediate = 1, .experts = 1, .top_k = 1};
  desc.layout.orientation = WeightOrientation::transposed;
  LogicalWeights logical = zero_weights(desc);
  logical.gate = {1, 2};  // [n=1, d=2]
  logical.up = {3, 4};
  logical.down = {5, 6};
  StoredWeights const stored = stored_weights(desc, logical);
  EXPECT_EQ(stored.w_up, (Values{1, 3, 2, 4}));  // [d, 2n]
  EXPECT_EQ(stored.w_down, (Values{5, 6}));      // [n, d]
}

TEST(Activation, KnownValues) {
  auto const phi = [](ActivationKind kind, double x) {
    return activate({.kind = kind}, x, kind >= ActivationKind::relu ? x : 1);
  };
  EXPECT_DOUBLE_EQ(phi(ActivationKind::silu, 1), 1 / (1 + std::exp(-1.0)));
  EXPECT_NEAR(phi(ActivationKind::gelu_erf, 1), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(phi(ActivationKind::gelu, 1), 0.8411919906082768, 1e-15);
  EXPECT_NEAR(phi(ActivationKind::geglu_erf, -2), -0.04550026389635842, 1e-16);
  EXPECT_EQ(phi(ActivationKind::relu2, -3), 0);
  EXPECT_EQ(phi(ActivationKind::relu, 3), 3);
}

TEST(Activation, ClampedSwigluClampsAndPassesGradientAtTheBounds) {
  Activation const act{ActivationKind::clamped_swiglu, 1.702f, 7.0f, 1.0f};
  double const at_limit = activate(act, 7, 7);
  EXPECT_DOUBLE_EQ(activate(act, 9, 8), at_limit);
  EXPECT_DOUBLE_EQ(at_limit, 8 * 7 / (1 + std::exp(-double{act.alpha} * 7)));
  EXPECT_NE(activation_gradient(act, 7, 7, 1).gate, 0);
  EXPECT_NE(activation_gradient(act, 7, -7, 1).up, 0);
  EXPECT_EQ(activation_gradient(act, 7.001, 7.001, 1).gate, 0);
  EXPECT_EQ(activation_gradient(act, 7, -7.001, 1).up, 0);
  EXPECT_DOUBLE_EQ(activate(act, -30, 0),
                   -30 / (1 + std::exp(double{act.alpha} * 30)));  // no lower clamp
}

TEST(Activation, ReluHasSlopeZeroAtZeroAndNanPropagates) {
  EXPECT_EQ(activation_gradient({.kind = ActivationKind::relu}, 0, 0, 1).up, 0);
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::gelu_erf); ++kind) {
    EXPECT_TRUE(std::isnan(activate({.kind = static_cast<ActivationKind>(kind)}, NAN, NAN)))
        << kind;
  }
}

/// Scores of one token's choice.
Values scores_of(MoeDesc const& desc, Values const& logits, std::vector<std::int64_t> ids) {
  Inputs inputs;
  inputs.desc = desc;
  inputs.topk_ids = std::move(ids);
  return router_scores(inputs, metadata(desc, inputs.topk_ids, {}), logits);
}

TEST(Router, TopkSoftmaxOfKnownLogits) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 4, .top_k = 2};
  desc.router.kind = RouterKind::topk_softmax;
  desc.router.route_scale = 2;
  Values const logits = {0, std::log(3.0), -1, 0};
  auto const ids = select_experts(desc, logits);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{1, 0}));  // the tie goes to expert 0
  Values const scores = scores_of(desc, logits, ids);
  EXPECT_NEAR(scores[0], 1.5, 1e-15);
  EXPECT_NEAR(scores[1], 0.5, 1e-15);

  desc.router.kind = RouterKind::softmax_topk;
  EXPECT_NEAR(scores_of(desc, logits, ids)[0], 2 * 3 / (5 + std::exp(-1.0)), 1e-15);
}

TEST(Router, ScoresOfItsOwnP) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 4, .top_k = 2};
  desc.router.kind = RouterKind::sigmoid_bias;
  Values const logits = {0, std::log(3.0), -1, 0};
  EXPECT_NEAR(scores_of(desc, logits, {1, 0})[0], 0.75, 1e-15);
  desc.router.normalize_scores = true;
  EXPECT_NEAR(scores_of(desc, logits, {1, 0})[0], 0.6, 1e-15);
  desc.router.kind = RouterKind::sqrtsoftplus;
  desc.router.normalize_scores = false;
  EXPECT_NEAR(scores_of(desc, logits, {1, 0})[0], std::sqrt(std::log(4.0)), 1e-15);
}

TEST(Router, GroupsWithTheBestPairsAreKept) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 6, .top_k = 2};
  desc.router = {.kind = RouterKind::group_limited, .groups = 3, .top_groups = 1};
  Values const keys = {0.9, 0.1, 0.6, 0.5, 0.6, 0.5};
  EXPECT_EQ(group_sums(desc, keys.data())[0], 1.0);
  EXPECT_EQ(select_experts(desc, keys), (std::vector<std::int64_t>{2, 3}));  // ties: lower group
  desc.router.top_groups = 3;
  EXPECT_EQ(select_experts(desc, keys), (std::vector<std::int64_t>{0, 2}));
}

TEST(Router, NanRanksHighest) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 3, .top_k = 2};
  EXPECT_EQ(select_experts(desc, {5, NAN, 6}), (std::vector<std::int64_t>{1, 2}));
}

}  // namespace
}  // namespace tessera::reference
