// SPDX-License-Identifier: Apache-2.0
// An fp32 router beside bf16 experts: logits and gradients are those of the fp32 weights, with every router and every
// way of calling; what does not fit is refused by the name of the tensor to change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

using Bf16s = std::vector<std::uint16_t>;

/// Rounds `values` to bf16 in place; returns them as stored.
Bf16s to_bf16(Floats& values) {
  Bf16s out;
  for (float& value : values) {
    auto bits = std::uint32_t{};
    std::memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
    out.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return out;
}

/// A contiguous bf16 tensor of the shape of `like`.
template <class View>
Tensor as_bf16(Bf16s& memory, View const& like) {
  Tensor out = tensor(memory.data(), DType::bf16, {});
  out.rank = like.rank;
  std::copy_n(like.shape, kMaxRank, out.shape);
  std::copy_n(like.stride, kMaxRank, out.stride);
  return out;
}

MoeDesc mixed_desc(RouterKind kind) {
  MoeDesc desc = small_desc(kind);
  desc.shape.hidden = 40;
  desc.dtype = DType::bf16;
  desc.router_dtype = DType::fp32;
  return desc;
}

/// A Layer whose tensors, but for those of the router, are bf16.
struct MixedLayer : Layer {
  Bf16s x16 = to_bf16(x), d_o16 = to_bf16(d_o), w_up16 = to_bf16(w_up), w_down16 = to_bf16(w_down);
  Bf16s b_up16 = to_bf16(b_up), b_down16 = to_bf16(b_down);
  Bf16s o16 = Bf16s(o.size()), h16 = Bf16s(h.size()), dx16 = Bf16s(dx.size());
  Bf16s dw_up16 = Bf16s(dw_up.size()), dw_down16 = Bf16s(dw_down.size());
  Bf16s db_up16 = Bf16s(db_up.size()), db_down16 = Bf16s(db_down.size());
  Floats logits, dlogits;

  MixedLayer(Context const& context_, MoeDesc const& desc_, unsigned seed = 1)
      : Layer(context_, desc_, seed) {
    forward.x = backward.x = as_bf16(x16, forward.x);
    forward.weights = {.w_up = as_bf16(w_up16, forward.weights.w_up),
                       .w_down = as_bf16(w_down16, forward.weights.w_down),
                       .b_up = as_bf16(b_up16, forward.weights.b_up),
                       .b_down = as_bf16(b_down16, forward.weights.b_down)};
    forward.o = as_bf16(o16, forward.o);
    forward.h = as_bf16(h16, forward.h);
    logits.resize(static_cast<std::size_t>(desc.shape.tokens * desc.shape.experts));
    dlogits.resize(logits.size());
    forward.logits = tensor(logits.data(), {desc.shape.tokens, desc.shape.experts});
    backward.d_o = as_bf16(d_o16, backward.d_o);
    backward.h = forward.h;
    backward.weights = forward.weights;
    backward.b_router = forward.b_router;
    backward.dx = as_bf16(dx16, backward.dx);
    backward.dlogits = tensor(dlogits.data(), {desc.shape.tokens, desc.shape.experts});
    ExpertGradients& g = backward.gradients;
    g.dw_up = as_bf16(dw_up16, g.dw_up);
    g.dw_down = as_bf16(dw_down16, g.dw_down);
    g.db_up = as_bf16(db_up16, g.db_up);
    g.db_down = as_bf16(db_down16, g.db_down);
  }
};

struct RouterDType : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));
  std::vector<MoeDesc> descs() const {
    std::vector<MoeDesc> out;
    for (RouterKind const kind :
         {RouterKind::topk_softmax, RouterKind::softmax_topk, RouterKind::softmax_topk_renorm,
          RouterKind::sigmoid_bias, RouterKind::group_limited, RouterKind::sqrtsoftplus,
          RouterKind::expert_choice}) {
      out.push_back(mixed_desc(kind));
    }
    out.push_back(mixed_desc(RouterKind::topk_softmax));
    out.back().router.round = Rounding::nr_f;
    out.back().router.tile = 4;
    out.push_back(mixed_desc(RouterKind::sigmoid_bias));
    out.back().save = SavePolicy::x;
    return out;
  }
};

/// |out - ref| <= limit * sum of |terms|, where `term(i)` are the products that ref adds up.
template <class Term>
void expect_sum(float out, std::int64_t count, double limit, Term&& term) {
  double sum = 0, size = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += term(i);
    size += std::abs(term(i));
  }
  EXPECT_LE(std::abs(static_cast<double>(out) - sum), limit * size) << out << " for " << sum;
}

// bf16 weights would be off by up to 2^-9 of each term.
constexpr double kFp32 = 0x1p-20;

TEST_F(RouterDType, LogitsAndGradientsAreThoseOfTheFp32Weights) {
  for (MoeDesc const& desc : descs()) {
    MixedLayer layer(context, desc);
    if (desc.save == SavePolicy::x) {
      layer.forward.h = {};
      layer.backward.h = {};
    }
    ASSERT_TRUE(layer.run_forward().ok()) << layer.run_forward().text();
    Status const status = layer.run_backward();
    ASSERT_TRUE(status.ok()) << status.text();
    std::int64_t const tokens = desc.shape.tokens, d = desc.shape.hidden, n = desc.shape.experts;
    double largest = 0;
    for (std::int64_t e = 0; e < n; ++e) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        expect_sum(layer.logits[t * n + e], d + 1, kFp32, [&](std::int64_t c) {
          return c == d ? double{layer.b_router[e]}
                        : double{layer.x[t * d + c]} * double{layer.w_router[e * d + c]};
        });
      }
      for (std::int64_t c = 0; c < d; ++c) {
        expect_sum(layer.dw_router[e * d + c], tokens, kFp32, [&](std::int64_t t) {
          return double{layer.dlogits[t * n + e]} * double{layer.x[t * d + c]};
        });
        largest = std::max(largest, std::abs(double{layer.dw_router[e * d + c]}));
      }
      expect_sum(layer.db_router[e], tokens, kFp32,
                 [&](std::int64_t t) { return double{layer.dlogits[t * n + e]}; });
    }
    EXPECT_GT(largest, 1e-3) << "router " << static_cast<int>(desc.router.kind);
  }
}

// Experts that add nothing to dx leave the router's part of it alone.
TEST_F(RouterDType, DxHasTheFp32WeightsPart) {
  MoeDesc const desc = mixed_desc(RouterKind::softmax_topk);
  MixedLayer layer(context, desc);
  std::fill(layer.w_up16.begin(), layer.w_up16.end(), std::uint16_t{0});
  ASSERT_TRUE(layer.run_forward().ok());
  ASSERT_TRUE(layer.run_backward().ok());
  std::int64_t const d = desc.shape.hidden, n = desc.shape.experts;
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    for (std::int64_t c = 0; c < d; ++c) {
      double sum = 0;
      for (std::int64_t e = 0; e < n; ++e) {
        sum += double{layer.dlogits[t * n + e]} * double{layer.w_router[e * d + c]};
      }
      Floats exact = {static_cast<float>(sum)};
      EXPECT_EQ(layer.dx16[t * d + c], to_bf16(exact)[0]) << sum;
    }
  }
}

TEST_F(RouterDType, RouteHasTheBitsOfTheLayer) {
  MoeDesc const desc = mixed_desc(RouterKind::sigmoid_bias);
  MixedLayer layer(context, desc);
  ASSERT_TRUE(layer.run_forward().ok());
  MoeShape const& s = desc.shape;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(s.tokens * s.top_k));
  Floats weights(ids.size()), logits(layer.logits.size());
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::route)));
  RouteArgs args;
  args.x = layer.forward.x;
  args.w_router = layer.forward.w_router;
  args.b_router = layer.forward.b_router;
  args.topk_ids = tensor(ids.data(), {s.tokens, s.top_k});
  args.topk_weights = tensor(weights.data(), {s.tokens, s.top_k});
  args.logits = tensor(logits.data(), {s.tokens, s.experts});
  args.workspace = {workspace.data(), workspace.size()};
  Status const status = route(context, desc, args);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(logits, layer.logits);
  RoutingView const tables = layer.tables();
  EXPECT_EQ(weights, Floats(tables.scores, tables.scores + weights.size()));

  // Replayed, the choice has the same scores.
  MoeDesc replay = desc;
  replay.router.replay = true;
  MixedLayer again(context, replay);
  again.forward.topk_ids = args.topk_ids;
  ASSERT_TRUE(again.run_forward().ok());
  EXPECT_EQ(again.o16, layer.o16);
  ASSERT_TRUE(layer.run_backward().ok());
  ASSERT_TRUE(again.run_backward().ok());
  EXPECT_EQ(again.dw_router, layer.dw_router);
}

TEST_F(RouterDType, ExpertGradientsMayBeOfEitherType) {
  MoeDesc const desc = mixed_desc(RouterKind::topk_softmax);
  MixedLayer bf16(context, desc), fp32(context, desc);
  ExpertGradients& g = fp32.backward.gradients;
  g.dw_up = tensor(fp32.dw_up.data(), {desc.shape.experts, 20, desc.shape.hidden});
  g.dw_down = g.db_up = g.db_down = {};
  for (MixedLayer* const layer : {&bf16, &fp32}) {
    ASSERT_TRUE(layer->run_forward().ok());
    Status const status = layer->run_backward();
    ASSERT_TRUE(status.ok()) << status.text();
  }
  EXPECT_EQ(bf16.dw_router, fp32.dw_router);
  EXPECT_EQ(bf16.dw_up16, to_bf16(fp32.dw_up));

  // Accumulated: the complete sum is added once.
  std::fill(fp32.dw_router.begin(), fp32.dw_router.end(), 2.5f);
  g.mode = GradientMode::accumulate;
  g.dw_up = g.db_router = {};
  ASSERT_TRUE(fp32.run_backward().ok());
  for (std::size_t i = 0; i < fp32.dw_router.size(); ++i) {
    EXPECT_EQ(fp32.dw_router[i], 2.5f + bf16.dw_router[i]);
  }
}

TEST_F(RouterDType, AnFp32LayerMaySayItsRouterIsFp32) {
  MoeDesc said = small_desc(RouterKind::topk_softmax);
  Layer plain(context, said);
  said.router_dtype = DType::fp32;
  Layer same(context, said);
  for (Layer* const layer : {&plain, &same}) {
    ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_TRUE(layer->run_backward().ok());
  }
  EXPECT_EQ(plain.o, same.o);
  EXPECT_EQ(plain.dw_router, same.dw_router);
}

TEST_F(RouterDType, WhatDoesNotFitIsRefusedByName) {
  auto const expect_text = [](Status const& status, std::string const& part) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
  };
  auto const refused = [&](std::string const& part, auto&& change) {
    MixedLayer layer(context, mixed_desc(RouterKind::topk_softmax));
    change(layer);
    expect_text(layer.run_forward(), part);
  };
  refused("w_router: dtype bf16, but router_dtype says fp32",
          [](MixedLayer& layer) { layer.forward.w_router.dtype = DType::bf16; });
  refused("w_router: dtype fp32, but router_dtype says bf16",
          [](MixedLayer& layer) { layer.desc.router_dtype = DType::none; });
  refused("b_router: dtype bf16, but router_dtype says fp32",
          [](MixedLayer& layer) { layer.forward.b_router.dtype = DType::bf16; });
  refused("w_router: dtype fp16 beside x in bf16",
          [](MixedLayer& layer) { layer.forward.w_router.dtype = DType::fp16; });
  refused("router_dtype=fp16 beside dtype=bf16",
          [](MixedLayer& layer) { layer.desc.router_dtype = DType::fp16; });
  refused("router_dtype=77",
          [](MixedLayer& layer) { layer.desc.router_dtype = static_cast<DType>(77); });
  refused("router_dtype=bf16 beside dtype=fp32", [](MixedLayer& layer) {
    layer.desc.dtype = DType::fp32;
    layer.desc.router_dtype = DType::bf16;
  });
  refused("router_dtype=fp32 with router given",
          [](MixedLayer& layer) { layer.desc.router.kind = RouterKind::given; });

  MixedLayer layer(context, mixed_desc(RouterKind::topk_softmax));
  ASSERT_TRUE(layer.run_forward().ok());
  layer.backward.gradients.dw_router.dtype = DType::bf16;
  expect_text(layer.run_backward(), "dw_router: dtype bf16; fp32 is needed");
}

}  // namespace
}  // namespace tessera::api_test
