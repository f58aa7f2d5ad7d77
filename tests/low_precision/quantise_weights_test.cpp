// SPDX-License-Identifier: Apache-2.0
// quantise_weights() against the reference's quantisation of the logical weights, for every layout and both recipes.
#include <gtest/gtest.h>

#include "cpu/reference/layout.hpp"
#include "tests/low_precision/support.hpp"

namespace tessera::low_precision_tests {
namespace {

using reference::Quantised;

constexpr std::int64_t kD = 384, kN = 256, kE = 2;

MoeDesc make_desc(WeightLayout layout, ActivationKind activation) {
  MoeDesc desc;
  desc.shape = {.tokens = 4, .hidden = kD, .intermediate = kN, .experts = kE, .top_k = 1};
  desc.dtype = DType::bf16;
  desc.layout = layout;
  desc.activation.kind = activation;
  return desc;
}

struct WeightCodes {
  std::vector<std::uint8_t> up, up_t, down, down_t, up_bytes, down_bytes, up_t_bytes, down_t_bytes;
  std::vector<float> up_scales, down_scales;
};

std::vector<std::uint8_t> bytes(std::int64_t count) {
  return std::vector<std::uint8_t>(count, 0xaa);
}
Tensor codes(std::vector<std::uint8_t>& data, std::int64_t rows, std::int64_t width) {
  return tensor(data.data(), DType::fp8_e4m3, {kE, rows, width});
}

struct Case {
  MoeDesc desc;
  ScaleRule rule;
  reference::LogicalWeights logical;
  std::vector<core::Bf16> w_up, w_gate, w_down;
  ExpertWeights weights;
  WeightCodes made;
  QuantisedWeights out;
  [[nodiscard]] bool mxfp8() const { return rule >= ScaleRule::rceil; }
  [[nodiscard]] std::int64_t w() const { return desc.up_width(); }
};

void make_weights(Case& test) {
  reference::LogicalWeights& w = test.logical;
  if (test.desc.activation.gated()) w.gate = normal(kE * kN * kD, 11, 0.05);
  w.up = normal(kE * kN * kD, 12, 0.04);
  w.down = normal(kE * kD * kN, 13, 0.06);
  auto const scale_blocks = [](Values& values, std::int64_t width, int salt) {
    for (std::size_t i = 0; i < values.size(); ++i) {  // blocks of 32 whose scales all differ
      auto const r = static_cast<std::int64_t>(i) / width, c = static_cast<std::int64_t>(i) % width;
      values[i] =
          std::ldexp(values[i], static_cast<int>((r / 32 * 5 + c / 32 * 3 + salt) % 13 - 6));
    }
  };
  scale_blocks(w.gate, kD, 1);
  scale_blocks(w.up, kD, 4);
  scale_blocks(w.down, kN, 0);
  auto const stored = reference::stored_weights(test.desc, w);
  test.w_up = packed(stored.w_up);
  test.w_gate = packed(stored.w_gate);
  test.w_down = packed(stored.w_down);
  std::int64_t const rows = test.w() * kN;
  auto const weight = [](std::vector<core::Bf16> const& data, std::int64_t r, std::int64_t c) {
    return tensor(static_cast<void const*>(data.data()), DType::bf16, {kE, r, c});
  };
  switch (test.desc.layout.orientation) {
    case WeightOrientation::rows:
      test.weights = {.w_up = weight(test.w_up, rows, kD), .w_down = weight(test.w_down, kD, kN)};
      break;
    case WeightOrientation::transposed:
      test.weights = {.w_up = weight(test.w_up, kD, rows), .w_down = weight(test.w_down, kN, kD)};
      break;
    case WeightOrientation::separate:
      test.weights = {.w_up = weight(test.w_up, kN, kD),
                      .w_gate = weight(test.w_gate, kN, kD),
                      .w_down = weight(test.w_down, kD, kN)};
      break;
  }
}

void make_outputs(Case& test) {
  WeightCodes& l = test.made;
  std::int64_t const w = test.w();
  l.up = l.up_t = bytes(kE * w * kN * kD);
  l.down = l.down_t = bytes(kE * kD * kN);
  test.out = {.up = tensor(l.up.data(), DType::fp8_e4m3, {kE, w, kN, kD}),
              .up_transposed = codes(l.up_t, kD, w * kN),
              .down = codes(l.down, kD, kN),
              .down_transposed = codes(l.down_t, kN, kD)};
  if (test.mxfp8()) {
    std::int64_t const up = scale_atom_bytes(kN, kD / 32), down = scale_atom_bytes(kD, kN / 32),
                       up_t = scale_atom_bytes(kD, w * kN / 32);
    l.up_bytes = bytes(kE * w * up);
    l.down_bytes = bytes(kE * down);
    l.up_t_bytes = bytes(kE * up_t);
    l.down_t_bytes = bytes(kE * up);
    test.out.up_scales = tensor(l.up_bytes.data(), DType::e8m0, {kE, w, up});
    test.out.down_scales = tensor(l.down_bytes.data(), DType::e8m0, {kE, down});
    test.out.up_transposed_scales = tensor(l.up_t_bytes.data(), DType::e8m0, {kE, up_t});
    test.out.down_transposed_scales = tensor(l.down_t_bytes.data(), DType::e8m0, {kE, up});
  } else {
    l.up_scales.assign(kE * w * (kN / 128) * (kD / 128), NAN);
    l.down_scales.assign(kE * (kN / 128) * (kD / 128), NAN);
    test.out.up_scales = tensor(l.up_scales.data(), {kE, kN / 128, kD / 128, w});
    test.out.down_scales = tensor(l.down_scales.data(), {kE, kD / 128, kN / 128});
  }
}

/// The matrix [rows,width] of part `part` of w: codes at `have` and, transposed, in columns of `have_t`; the scales.
void expect_part(Case const& test, Values const& values, std::int64_t rows, std::int64_t width,
                 std::int64_t part, std::int64_t parts, bool up) {
  WeightCodes const& l = test.made;
  auto const& have = up ? l.up : l.down;
  auto const& have_t = up ? l.up_t : l.down_t;
  Block const along = test.mxfp8() ? Block{1, 32} : Block{128, 128};
  Block const down = test.mxfp8() ? Block{32, 1} : Block{128, 128};
  Quantised const a = reference::quantise(values, kE * rows, width, along, test.rule);
  Quantised const b = reference::quantise(values, kE * rows, width, down, test.rule);
  for (std::int64_t e = 0; e < kE; ++e) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < width; ++c) {
        std::int64_t const i = (e * rows + r) * width + c;
        ASSERT_EQ(have[((e * parts + part) * rows + r) * width + c], code_of(a.codes[i])) << i;
        ASSERT_EQ(have_t[(e * width + c) * parts * rows + part * rows + r], code_of(b.codes[i]))
            << i;
        double const scale = a.scales[a.scale_index(e * rows + r, c)];
        double const scale_t = b.scales[b.scale_index(e * rows + r, c)];
        if (!test.mxfp8()) {
          std::int64_t const block = (e * (rows / 128) + r / 128) * (width / 128) + c / 128;
          ASSERT_EQ(up ? l.up_scales[block * parts + part] : l.down_scales[block], scale);
          continue;
        }
        auto const& atoms = up ? l.up_bytes : l.down_bytes;
        auto const& atoms_t = up ? l.up_t_bytes : l.down_t_bytes;
        std::int64_t const size = scale_atom_bytes(rows, width / 32),
                           size_turned = scale_atom_bytes(width, parts * rows / 32);
        ASSERT_EQ(atoms[(e * parts + part) * size + scale_atom_offset(r, c / 32, width / 32)],
                  e8m0_of(scale));
        ASSERT_EQ(atoms_t[e * size_turned +
                          scale_atom_offset(c, (part * rows + r) / 32, parts * rows / 32)],
                  e8m0_of(scale_t));
      }
    }
  }
}

void expect_weights(WeightLayout layout, ActivationKind activation, ScaleRule rule) {
  Case test{make_desc(layout, activation), rule, {}, {}, {}, {}, {}, {}, {}};
  make_weights(test);
  make_outputs(test);
  Status const status = quantise_weights(context(3), test.desc, test.weights, rule, test.out);
  ASSERT_TRUE(status.ok()) << status.text();
  std::int64_t const w = test.w();
  if (w == 2) expect_part(test, test.logical.gate, kN, kD, 0, 2, true);
  expect_part(test, test.logical.up, kN, kD, w - 1, w, true);
  expect_part(test, test.logical.down, kD, kN, 0, 1, false);
}

TEST(QuantiseWeights, EveryLayoutGivesTheSame) {
  for (auto const orientation :
       {WeightOrientation::rows, WeightOrientation::transposed, WeightOrientation::separate}) {
    for (auto const order : {GateUpOrder::concat, GateUpOrder::up_first, GateUpOrder::interleaved,
                             GateUpOrder::blocked}) {
      bool const separate = orientation == WeightOrientation::separate;
      if (separate && order != GateUpOrder::concat) continue;
      SCOPED_TRACE(static_cast<int>(orientation) * 10 + static_cast<int>(order));
      WeightLayout const layout{order, orientation, order == GateUpOrder::blocked ? 32 : 0};
      expect_weights(layout, ActivationKind::swiglu, ScaleRule::fp32);
      if (order == GateUpOrder::concat || order == GateUpOrder::blocked) {
        expect_weights(layout, ActivationKind::swiglu, ScaleRule::rceil);
      }
    }
  }
}

TEST(QuantiseWeights, ActivationsWithoutGateAndOtherRules) {
  expect_weights({}, ActivationKind::relu2, ScaleRule::pow2);
  expect_weights({.orientation = WeightOrientation::transposed}, ActivationKind::relu2,
                 ScaleRule::floor);
}

TEST(QuantiseWeights, RefusesWhatDoesNotFit) {
  Case test{make_desc({}, ActivationKind::swiglu), ScaleRule::fp32, {}, {}, {}, {}, {}, {}, {}};
  make_weights(test);
  make_outputs(test);
  auto const expect = [&](char const* text, auto&& change) {
    MoeDesc desc = test.desc;
    QuantisedWeights out = test.out;
    ScaleRule rule = test.rule;
    change(desc, out, rule);
    Status const status = quantise_weights(context(3), desc, test.weights, rule, out);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(std::string(status.text()).find(text), std::string::npos)
        << text << " is not in: " << status.text();
  };
  expect("intermediate=192: blocks need a multiple of 128; pad it to 256",
         [](MoeDesc& desc, auto&, auto&) { desc.shape.intermediate = 192; });
  expect("hidden=100: blocks need a multiple of 32", [](MoeDesc& desc, auto&, ScaleRule& rule) {
    desc.shape.hidden = 100;
    rule = ScaleRule::rceil;
  });
  expect("rule=7", [](auto&, auto&, ScaleRule& rule) { rule = static_cast<ScaleRule>(7); });
  expect("up: missing", [](auto&, QuantisedWeights& out, auto&) { out.up = {}; });
  expect("up_scales: shape",
         [](auto&, QuantisedWeights& out, auto&) { out.up_scales.shape[3] = 1; });
  expect("up_transposed_scales: given, but",
         [](auto&, QuantisedWeights& out, auto&) { out.up_transposed_scales = out.up_scales; });
  expect("w_up: dtype bf16", [](MoeDesc& desc, auto&, auto&) { desc.dtype = DType::fp32; });
  QuantisedWeights one_way = test.out;  // for inference
  one_way.up_transposed = one_way.down_transposed = {};
  EXPECT_TRUE(quantise_weights(context(3), test.desc, test.weights, test.rule, one_way).ok());
}

}  // namespace
}  // namespace tessera::low_precision_tests
