// SPDX-License-Identifier: Apache-2.0
// The layer with quantised operands: with quantisers that change nothing it is the layer, gradients included; with the
// recipes' it has the errors that docs/notebook/2026-11-27-fp8-numerics.md states.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/low_precision/layer_data.hpp"

namespace tessera::low_precision_tests {
namespace {

using namespace reference;

TEST(LowPrecisionLayer, WithIdentityQuantisersIsTheLayer) {
  for (auto const activation : {ActivationKind::swiglu, ActivationKind::relu2}) {
    LayerValues data =
        make_layer({.tokens = 9, .hidden = 12, .intermediate = 8, .experts = 4, .top_k = 2}, 3);
    data.inputs.desc.activation.kind = activation;
    if (activation == ActivationKind::relu2) data.inputs.weights.w_up.resize(4 * 8 * 12);
    Forward const f = forward(data.inputs);
    Backward const b = backward(data.inputs, f, data.d_o);
    auto const q = low_precision_forward(data.inputs, kExact);
    Backward const g = low_precision_backward(kExact, q, data.d_o);
    EXPECT_EQ(q.forward.o, f.o);
    EXPECT_EQ(g.dx, b.dx);
    EXPECT_EQ(g.dscores, b.dscores);
    EXPECT_EQ(g.gradients.w_up, b.gradients.w_up);
    EXPECT_EQ(g.gradients.w_down, b.gradients.w_down);
  }
}

/// Central differences of <o, dO> along some of `values`, a member of data.inputs.
void expect_gradient(LayerValues& data, Values& values, Values const& gradient, char const* name) {
  auto const loss = [&] {
    auto const o = low_precision_forward(data.inputs, kExact).forward.o;
    return dot(o.data(), data.d_o.data(), std::ssize(o));
  };
  ASSERT_EQ(values.size(), gradient.size()) << name;
  for (std::size_t i = 0; i < values.size(); i += values.size() / 25 + 1) {
    double const value = values[i], step = 1e-5;
    values[i] = value + step;
    double const above = loss();
    values[i] = value - step;
    double const below = loss();
    values[i] = value;
    double const difference = (above - below) / (2 * step);
    EXPECT_NEAR(gradient[i], difference, 1e-6 * (1 + std::abs(difference))) << name << i;
  }
}

TEST(LowPrecisionLayer, WithIdentityQuantisersPassesFiniteDifferences) {
  LayerValues data =
      make_layer({.tokens = 7, .hidden = 12, .intermediate = 8, .experts = 4, .top_k = 2}, 4);
  auto const q = low_precision_forward(data.inputs, kExact);
  Backward const g = low_precision_backward(kExact, q, data.d_o);
  expect_gradient(data, data.inputs.x, g.dx, "dx");
  expect_gradient(data, data.inputs.weights.w_up, g.gradients.w_up, "dw_up");
  expect_gradient(data, data.inputs.weights.w_down, g.gradients.w_down, "dw_down");
  expect_gradient(data, data.inputs.scores, g.dscores, "ds");
}

TEST(LowPrecisionLayer, PassesAreOfTheValuesThatTheyRead) {
  // Quantised backward is the reference's backward of the operands that it names: formulas, not errors.
  LayerValues const data =
      make_layer({.tokens = 16, .hidden = 256, .intermediate = 128, .experts = 2, .top_k = 1}, 5);
  Recipe recipe = fp8_block(ScaleRule::pow2);
  recipe.round = false;
  auto const q = low_precision_forward(data.inputs, recipe);
  Backward const g = low_precision_backward(recipe, q, data.d_o);

  MoeDesc const& desc = data.inputs.desc;
  Block const row{1, 128}, square{128, 128};
  auto const rows = [&](Values const& values, std::int64_t width) {
    return dequantised(quantise(values, std::ssize(values) / width, width, row, ScaleRule::pow2));
  };
  auto const weight = [&](Values const& values, std::int64_t width) {
    return dequantised(
        quantise(values, std::ssize(values) / width, width, square, ScaleRule::pow2));
  };
  Inputs inputs = data.inputs;
  LogicalWeights logical = logical_weights(desc, inputs.weights);
  logical.gate = weight(logical.gate, 256);
  logical.up = weight(logical.up, 256);
  logical.down = weight(logical.down, 128);
  inputs.weights = stored_weights(desc, logical);
  inputs.x = rows(inputs.x, 256);
  Forward const f = forward(inputs);  // h of x8 and w8; its a is not quantised
  for (auto const& [have, want] :
       {std::pair{&q.forward.h_gate, &f.h_gate}, {&q.forward.h_up, &f.h_up}}) {
    Values const rounded = rows(*want, 128);
    ASSERT_EQ(*have, rounded);
  }
  EXPECT_EQ(q.a, rows(f.a, 128));
  for (std::int64_t r = 0; r < f.metadata.rows(); ++r) {  // ds = <dO8 w8_down, act(h8)>
    std::int64_t const slot = f.metadata.sort_permutation[r], t = f.metadata.gather_index[r];
    std::int64_t const e = data.inputs.topk_ids[slot];
    Values const d_o = rows(data.d_o, 256);
    double ds = 0;
    for (std::int64_t i = 0; i < 128; ++i) {
      double da = 0;
      for (std::int64_t c = 0; c < 256; ++c)
        da += d_o[t * 256 + c] * logical.down[(e * 256 + c) * 128 + i];
      double const gate = q.forward.h_gate[r * 128 + i], up = q.forward.h_up[r * 128 + i];
      ds += da * gate / (1 + std::exp(-gate)) * up;
    }
    EXPECT_NEAR(g.dscores[slot], ds, 1e-9 * (1 + std::abs(ds)));
  }
  Values dw(logical.down.size());  // dw_down = dO^T (s act(h8)): dO as it is
  for (std::int64_t r = 0; r < f.metadata.rows(); ++r) {
    std::int64_t const t = f.metadata.gather_index[r],
                       e = data.inputs.topk_ids[f.metadata.sort_permutation[r]];
    for (std::int64_t c = 0; c < 256; ++c) {
      add_scaled(data.d_o[t * 256 + c], &g.a_scaled[r * 128], 128, &dw[(e * 256 + c) * 128]);
    }
  }
  EXPECT_EQ(g.gradients.w_down, dw);
}

struct Row {
  char const* name;
  Recipe recipe;
  LayerSqnr expected;
};

constexpr Recipe saving(Recipe recipe, bool x8, bool h8) {
  recipe.save_x8 = x8;
  recipe.save_h8 = h8;
  return recipe;
}
constexpr Recipe kFp8 = fp8_block(ScaleRule::fp32), kMx = mxfp8(ScaleRule::rceil);
constexpr Recipe kBf16{.quantise = false, .save_x8 = false, .save_h8 = false};

// SQNR in dB at T 1024, d 1024, n 512, E 8, K 2.
constexpr Row kTable[] = {
    {"bf16", kBf16, {48, 49, 50, 49, 51.5}},
    {"fp8, x and h saved in bf16", saving(kFp8, false, false), {23.9, 23.7, 25.2, 25.5, 23.7}},
    {"fp8, x8 saved", saving(kFp8, true, false), {23.9, 23.7, 24.3, 25.5, 23.7}},
    {"fp8, h8 saved", saving(kFp8, false, true), {23.9, 22.9, 24.1, 23.5, 22.4}},
    {"fp8", kFp8, {23.9, 22.9, 23.4, 23.5, 22.4}},
    {"fp8, pow2", fp8_block(ScaleRule::pow2), {23.6, 22.6, 23.2, 23.3, 22.0}},
    {"fp8, floor", fp8_block(ScaleRule::floor), {23.3, 22.4, 23.1, 23.2, 22.0}},
    {"mxfp8, x and h saved in bf16", saving(kMx, false, false), {23.6, 23.4, 25.0, 25.3, 23.6}},
    {"mxfp8", kMx, {23.6, 22.6, 23.2, 23.3, 22.1}},
    {"mxfp8, floor", mxfp8(ScaleRule::floor), {22.3, 21.4, 22.3, 22.3, 21.2}},
};

LayerSqnr measure(LayerValues const& data, Forward const& f, Backward const& b,
                  Recipe const& recipe) {
  auto const q = low_precision_forward(data.inputs, recipe);
  return sqnr(f, b, q, low_precision_backward(recipe, q, data.d_o));
}

/// `slack` of ds is that of other seeds: few numbers, a few large ones of which decide.
void expect_table(MoeShape const& shape, std::uint64_t seed, double slack, double slack_of_ds) {
  LayerValues const data = make_layer(shape, seed);
  Forward const f = forward(data.inputs);
  Backward const b = backward(data.inputs, f, data.d_o);
  for (Row const& row : kTable) {
    SCOPED_TRACE(row.name);
    LayerSqnr const have = measure(data, f, b, row.recipe);
    double const more = row.recipe.quantise ? 0 : 0.5;  // stated in whole dB
    EXPECT_NEAR(have.out, row.expected.out, slack + more);
    EXPECT_NEAR(have.dx, row.expected.dx, slack + more);
    EXPECT_NEAR(have.dw_up, row.expected.dw_up, slack + more);
    EXPECT_NEAR(have.dw_down, row.expected.dw_down, slack + more);
    EXPECT_NEAR(have.ds, row.expected.ds, slack_of_ds);
    ::testing::Test::RecordProperty(
        row.name, std::to_string(have.out) + " " + std::to_string(have.dx) + " " +
                      std::to_string(have.dw_up) + " " + std::to_string(have.dw_down) + " " +
                      std::to_string(have.ds));
  }
}

TEST(LowPrecisionLayer, HasTheErrorsOfTheTableAtASmallShape) {
  expect_table({.tokens = 128, .hidden = 512, .intermediate = 256, .experts = 8, .top_k = 2}, 3,
               0.25, 1.2);
}

TEST(DeepLowPrecisionLayer, HasTheErrorsOfTheTable) {
  expect_table({.tokens = 1024, .hidden = 1024, .intermediate = 512, .experts = 8, .top_k = 2}, 1,
               0.2, 0.5);
}

TEST(LowPrecisionLayer, ScalesInFp32SurviveHeavyTails) {
  double lost = 0;
  for (std::uint64_t const seed : {2, 4}) {
    LayerValues const data =
        make_layer({.tokens = 96, .hidden = 512, .intermediate = 256, .experts = 8, .top_k = 2},
                   seed, Tail::student);
    Forward const f = forward(data.inputs);
    Backward const b = backward(data.inputs, f, data.d_o);
    LayerSqnr const exact = measure(data, f, b, kFp8);
    LayerSqnr const power = measure(data, f, b, fp8_block(ScaleRule::pow2));
    EXPECT_GE(exact.out, 23);
    EXPECT_GE(exact.dx, 22);
    EXPECT_GE(std::min(exact.dw_up, exact.dw_down), 22.5);
    EXPECT_GE(power.out, 20);
    EXPECT_GE(power.dx, 21.5);
    EXPECT_GE(std::min(power.dw_up, power.dw_down), 20);
    lost = std::max(lost, exact.out - power.out);
  }
  EXPECT_GE(lost,
            2);  // a block's largest value, which dominates there, is exact under fp32 scales alone
}

/// dB of o where a channel of x is times `factor`, its weights over it.
struct OutlierSqnr {
  double fp8, mxfp8;
};
OutlierSqnr with_outlier_channel(double factor) {
  LayerValues data =
      make_layer({.tokens = 96, .hidden = 512, .intermediate = 128, .experts = 4, .top_k = 2}, 8);
  for (std::int64_t t = 0; t < 96; ++t) {
    double& value = data.inputs.x[t * 512 + 200];
    value = to_bf16(factor * value);
  }
  for (std::int64_t row = 0; row < 4 * 2 * 128; ++row) {
    double& weight = data.inputs.weights.w_up[row * 512 + 200];
    weight = to_bf16(weight / factor);
  }
  Forward const f = forward(data.inputs);
  Backward const b = backward(data.inputs, f, data.d_o);
  OutlierSqnr const out{measure(data, f, b, kFp8).out, measure(data, f, b, kMx).out};
  ::testing::Test::RecordProperty("outlier channel x " + std::to_string(factor),
                                  std::to_string(out.fp8) + " " + std::to_string(out.mxfp8));
  return out;
}

TEST(LowPrecisionLayer, OutlierChannels) {
  OutlierSqnr const none = with_outlier_channel(1), usual = with_outlier_channel(1e4);
  EXPECT_NEAR(usual.fp8, none.fp8,
              0.5);  // 448 is 2^14.8 times the least normal value: the others keep their bits
  EXPECT_NEAR(usual.mxfp8, none.mxfp8, 0.5);
  OutlierSqnr const extreme = with_outlier_channel(1e7);
  EXPECT_LT(extreme.fp8, none.fp8 - 10);      // 127 channels of the block are lost
  EXPECT_GT(extreme.mxfp8, extreme.fp8 + 3);  // or 31
}

TEST(LowPrecisionLayer, OneOperandAndOneGemm) {
  Values const x = normal(64 * 512, 1), w = normal(128 * 512, 2, 1 / std::sqrt(512.0));
  Values const x8 = dequantised(quantise(x, 64, 512, {1, 128}, ScaleRule::fp32));
  Values const w8 = dequantised(quantise(w, 128, 512, {128, 128}, ScaleRule::fp32));
  Values exact(64 * 128), rounded(64 * 128);
  for (std::int64_t i = 0; i < 64; ++i) {
    for (std::int64_t j = 0; j < 128; ++j) {
      exact[i * 128 + j] = dot(&x[i * 512], &w[j * 512], 512);
      rounded[i * 128 + j] = dot(&x8[i * 512], &w8[j * 512], 512);
    }
  }
  EXPECT_NEAR(sqnr(x, x8), 32, 1);
  EXPECT_NEAR(sqnr(w, w8), 32, 1);
  EXPECT_NEAR(sqnr(exact, rounded), 28.9, 0.6);
}

}  // namespace
}  // namespace tessera::low_precision_tests
