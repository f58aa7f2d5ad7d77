// SPDX-License-Identifier: Apache-2.0
// Layers that quantise their operands: right ones pass, others do not.
#include "verify/low_precision.hpp"

#include <gtest/gtest.h>

#include "tessera/names.hpp"
#include "verify/runner.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {
namespace {

Context const& threads(std::int32_t count) {
  static Context const one = std::move(Context::create({.device = {}, .num_threads = 1})).value();
  static Context const three = std::move(Context::create({.device = {}, .num_threads = 3})).value();
  return count == 1 ? one : three;
}

struct Scheme {
  Precision precision;
  bool pow2_scales = false;
};
constexpr Scheme kFp8{Precision::fp8}, kPow2{Precision::fp8, true}, kMx{Precision::mxfp8};

LayerCase low_precision_case(Scheme const& scheme) {
  LayerCase out;
  out.desc.shape = {.tokens = 96, .hidden = 256, .intermediate = 128, .experts = 4, .top_k = 2};
  out.desc.dtype = DType::bf16;
  out.desc.bias = true;
  out.desc.precision = scheme.precision;
  out.desc.pow2_scales = scheme.pow2_scales;
  out.seed = 5;
  return out;
}

void expect_passes(LayerCase const& layer_case) {
  auto const result = verify_case(threads(3), threads(1), layer_case);
  ASSERT_TRUE(result.ok()) << result.status().text();
  EXPECT_TRUE(result.value().ok) << (result.value().failures.empty()
                                         ? ""
                                         : result.value().failures.front());
  EXPECT_TRUE(result.value().bitwise_repeat);
  EXPECT_GT(result.value().sqnr_db.at("o"), 20);
  EXPECT_LT(result.value().sqnr_db.at("o"), 30);  // it is not bf16
  EXPECT_NEAR(result.value().sqnr_db.at("dx"), result.value().recipe_sqnr_db.at("dx"), 0.1);
}

TEST(LowPrecisionCase, PassesWithEveryRouter) {
  for (auto const& scheme : {kFp8, kPow2, kMx}) {
    for (auto const router :
         {RouterKind::given, RouterKind::softmax_topk_renorm, RouterKind::expert_choice}) {
      LayerCase layer_case = low_precision_case(scheme);
      layer_case.desc.router.kind = router;
      if (router == RouterKind::given) layer_case.sentinel_fraction = 0.2;
      expect_passes(layer_case);
    }
  }
}

TEST(LowPrecisionCase, PassesWithEveryLayout) {
  for (auto const& layout : kLayoutNames) {
    LayerCase layer_case = low_precision_case(kFp8);
    layer_case.desc.shape.hidden = 128;
    layer_case.desc.layout = layout.value;
    if (layout.value.order == GateUpOrder::blocked) layer_case.desc.layout.block = 32;
    SCOPED_TRACE(layout.name);
    expect_passes(layer_case);
    layer_case.desc.precision = Precision::mxfp8;
    expect_passes(layer_case);
  }
}

TEST(LowPrecisionCase, PassesWithEveryOption) {
  auto const expect = [](auto&& change) {
    for (auto const& scheme : {kFp8, kMx}) {
      LayerCase layer_case = low_precision_case(scheme);
      layer_case.desc.router.kind = RouterKind::topk_softmax;
      layer_case.desc.shape.hidden = 128;
      change(layer_case);
      SCOPED_TRACE(scheme.precision == Precision::fp8 ? "fp8" : "mxfp8");
      expect_passes(layer_case);
    }
  };
  expect([](LayerCase& c) { c.desc.save = SavePolicy::x; });
  expect([](LayerCase& c) { c.gradient_mode = GradientMode::accumulate; });
  expect([](LayerCase& c) { c.aux_dlogits = true; });
  expect([](LayerCase& c) { c.padding_fraction = 0.3; });
  expect([](LayerCase& c) { c.desc.router_dtype = DType::fp32; });
  expect([](LayerCase& c) { c.desc.activation = {ActivationKind::gelu}; });
  expect([](LayerCase& c) { c.desc.bias = false; });
  expect([](LayerCase& c) { c.desc.router.round = Rounding::nr_f, c.desc.router.tile = 16; });
  // one expert has several tasks of rows, others none
  expect([](LayerCase& c) {
    c.desc.router.kind = RouterKind::given;
    c.desc.shape.tokens = 300;
    c.desc.shape.top_k = 1;
    c.routing.pattern = RoutingPattern::one_expert;
  });
}

TEST(LowPrecisionCase, PassesWithoutRows) {
  LayerCase layer_case = low_precision_case(kFp8);
  layer_case.desc.router.kind = RouterKind::given;
  layer_case.sentinel_fraction = 1;
  auto const result = verify_case(threads(3), threads(1), layer_case);
  ASSERT_TRUE(result.ok()) << result.status().text();
  EXPECT_TRUE(result.value().ok) << result.value().failures.front();
}

/// Everything that a result is judged by.
struct Judged {
  LayerData data;
  reference::Inputs inputs;
  reference::Forward forward;
  ReferenceTensors ref;
  std::vector<Tensors> recipe;
};

Judged judged(LayerCase const& layer_case) {
  Judged out;
  out.data = make_data(layer_case);
  out.inputs = reference_inputs(out.data);
  out.forward = reference::forward(out.inputs);
  reference::Values const d_o(out.data.d_o.begin(), out.data.d_o.end());
  out.ref =
      reference_tensors(out.data, out.forward, reference::backward(out.inputs, out.forward, d_o));
  out.recipe = recipe_samples(out.data, out.inputs);
  return out;
}

Tensors tensors_of(LayerData const& data) {
  auto out = run_candidate(threads(3), data, kPoisons[0], Alignment::element);
  EXPECT_TRUE(out.ok()) << out.status().text();
  out.value().tensors.erase("scores");
  return std::move(out.value().tensors);
}

bool accepts(Judged const& judged, Tensors const& out) {
  return all_ok(
             judge(judged.data, judged.inputs, judged.forward, judged.ref, judged.recipe, out)) &&
         lost_db(judged.ref, judged.recipe, out, judged.data.desc.num_slots()).empty();
}

TEST(LowPrecisionCase, WrongLayersAreRejected) {
  LayerCase layer_case = low_precision_case(kFp8);
  layer_case.desc.shape.tokens = 192;
  layer_case.desc.router.kind = RouterKind::given;
  Judged right = judged(layer_case);
  for (Tensors& sample : flipped_samples(right.data, right.inputs)) {  // which are no excuse
    right.recipe.push_back(std::move(sample));
  }
  Tensors const out = tensors_of(right.data);
  EXPECT_TRUE(accepts(right, out));
  // codes with other scales
  LayerData other = right.data;
  other.desc.pow2_scales = true;
  EXPECT_FALSE(accepts(right, tensors_of(other)));
  // weights of before a step
  LayerData stale = right.data;
  for (float& value : stale.w_up) value *= 1.0625f;
  EXPECT_FALSE(accepts(right, tensors_of(stale)));
  // x that was quantised before
  LayerData twice = right.data;
  auto const coarse =
      reference::quantise({twice.x.begin(), twice.x.end()}, 192, 256, {1, 32}, ScaleRule::rceil);
  auto const values = reference::dequantised(coarse);
  twice.x.assign(values.begin(), values.end());
  EXPECT_FALSE(accepts(right, tensors_of(twice)));
  // a row of its neighbour, a tensor of zeros
  for (char const* name : {"o", "dx", "dw_up", "dw_down", "dscores"}) {
    Tensors wrong = out;
    std::fill(wrong.at(name).begin(), wrong.at(name).end(), 0.0f);
    EXPECT_FALSE(accepts(right, wrong)) << name;
  }
  Tensors wrong = out;
  std::copy_n(out.at("o").begin(), 256, wrong.at("o").begin() + 256);
  EXPECT_FALSE(accepts(right, wrong));
}

// A code that rounding flips crosses the clamp: dw_gate was 1.7 times beyond what is allowed, before such codes had a
// sample of their own.
TEST(LowPrecisionCase, FlippedCodesMayCrossAClamp) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = 149, .hidden = 256, .intermediate = 256, .experts = 12, .top_k = 7};
  layer_case.desc.dtype = DType::bf16;
  layer_case.desc.activation = {ActivationKind::clamped_swiglu, 1, 2, 0};
  layer_case.desc.layout.orientation = WeightOrientation::separate;
  layer_case.desc.router.kind = RouterKind::softmax_topk_renorm;
  layer_case.desc.router.replay = true;
  layer_case.routing.pattern = RoutingPattern::one_expert;
  layer_case.seed = 1959858388;
  layer_case.desc.precision = Precision::fp8;
  auto const result = verify_case(threads(3), threads(1), layer_case);
  ASSERT_TRUE(result.ok()) << result.status().text();
  EXPECT_TRUE(result.value().ok) << result.value().failures.front();
}

// One or two rows of an expert, of which a few codes are not those of the recipe: where the recipe's errors cancel,
// dw_up was beyond what is allowed, before such codes had samples of their own: 7 of 30 seeds of this case. On a GPU
// two random cases were.
TEST(LowPrecisionCase, FlippedCodesOfFewRowsAreAllowed) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = 16, .hidden = 256, .intermediate = 256, .experts = 8, .top_k = 1};
  layer_case.desc.dtype = DType::bf16;
  layer_case.desc.router.kind = RouterKind::given;
  layer_case.desc.precision = Precision::fp8;
  layer_case.seed = 2;
  Judged judged_case = judged(layer_case);
  reference::Recipe recipe = recipe_of(judged_case.data.desc);
  recipe.offset = 0.7 * 0x1p-9;
  Tensors const out = recipe_sample(judged_case.data, judged_case.inputs, recipe);
  EXPECT_FALSE(accepts(judged_case, out));
  for (Tensors& sample : flipped_samples(judged_case.data, judged_case.inputs)) {
    judged_case.recipe.push_back(std::move(sample));
  }
  EXPECT_TRUE(accepts(judged_case, out));
}

// What is computed as without quantising has noise of fp32, of which a few dB mean nothing.
TEST(LostDb, ComparesQuantisedTensorsAlone) {
  ReferenceTensors ref;
  Tensors recipe, out;
  auto const add = [&](char const* name, double of_recipe, double of_out) {
    for (int i = 0; i < 8192; ++i) {
      double const value = 1 + i % 7, sign = i % 2 == 0 ? 1 : -1;
      ref[name].push_back(value);
      recipe[name].push_back(static_cast<float>(value * (1 + sign * of_recipe)));
      out[name].push_back(static_cast<float>(value * (1 + sign * of_out)));
    }
  };
  add("scores", 1e-6, 4e-6);
  EXPECT_TRUE(lost_db(ref, {recipe}, out, 4096).empty());
  add("dx", 0.05, 0.06);
  ASSERT_EQ(lost_db(ref, {recipe}, out, 4096).size(), 1u);
  EXPECT_TRUE(lost_db(ref, {recipe}, out, 4096).front().starts_with("dx: "));
}

// Of one token dw_router is an outer product of its five gradients: a flipped code of one of them is 1.2 dB.
TEST(LowPrecisionCase, FewSlotsMayLoseMore) {
  ReferenceTensors ref;
  Tensors recipe, out;
  for (int i = 0; i < 5000; ++i) {
    ref["dw_router"].push_back(1);
    recipe["dw_router"].push_back(1.05f);
    out["dw_router"].push_back(1.0575f);  // 1.2 dB less
    ref["dw_up"].push_back(1);
    recipe["dw_up"].push_back(1.05f);
    out["dw_up"].push_back(1.051f);
  }
  EXPECT_TRUE(lost_db(ref, {recipe}, out, 5).empty());
  ASSERT_EQ(lost_db(ref, {recipe}, out, 500).size(), 1u);
  EXPECT_TRUE(lost_db(ref, {recipe}, out, 500).front().starts_with("dw_router: "));
  for (float& value : out["dw_router"]) value = 1.08f;  // 4.1 dB less
  EXPECT_EQ(lost_db(ref, {recipe}, out, 5).size(), 1u);
  out["dw_up"].assign(5000, 1.06f);
  EXPECT_EQ(lost_db(ref, {recipe}, out, 5).size(),
            2u);  // how many slots there are is nothing to dw_up
}

TEST(LowPrecisionCase, RefusesWhatItDoesNotCompute) {
  auto const expect = [](char const* text, auto&& change) {
    LayerCase layer_case = low_precision_case(kFp8);
    change(layer_case);
    auto const result = verify_case(threads(3), threads(1), layer_case);
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_NE(std::string(result.status().text()).find(text), std::string::npos)
        << text << " is not in: " << result.status().text();
  };
  expect("dtype=fp32", [](LayerCase& c) { c.desc.dtype = DType::fp32; });
  expect("intermediate=96", [](LayerCase& c) { c.desc.shape.intermediate = 96; });
  expect("column_chunk=8", [](LayerCase& c) { c.desc.column_chunk = 8; });
  expect("pow2_scales with precision mxfp8",
         [](LayerCase& c) { c.desc.precision = Precision::mxfp8, c.desc.pow2_scales = true; });
  expect("hidden=144 with precision=mxfp8: blocks need a multiple of 32; pad it to 160",
         [](LayerCase& c) { c.desc.precision = Precision::mxfp8, c.desc.shape.hidden = 144; });
}

}  // namespace
}  // namespace tessera::verify
