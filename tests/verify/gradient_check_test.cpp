// SPDX-License-Identifier: Apache-2.0
// What samples of a large layer are judged by accepts the CPU's results on a small one, and rejects wrong ones.
#include "verify/gradient_check.hpp"

#include <gtest/gtest.h>

#include <utility>

#include "verify/candidate.hpp"
#include "verify/memory.hpp"

namespace tessera::verify {
namespace {

/// A layer of formulas, and what the CPU makes of it.
struct Sample {
  UniformLayer layer;
  LayerData data;
  CandidateResult result;
};

std::vector<float> values_of(UniformTensor const& tensor, std::size_t count) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(tensor.at(static_cast<std::int64_t>(i)));
  }
  return out;
}

Sample make_sample(WeightLayout const& layout) {
  LayerCase layer_case;
  MoeDesc& desc = layer_case.desc;
  desc.shape = {.tokens = 24, .hidden = 40, .intermediate = 24, .experts = 6, .top_k = 2};
  desc.dtype = DType::bf16;
  desc.bias = true;
  desc.layout = layout;
  desc.router.kind = RouterKind::softmax_topk;
  layer_case.router_bias = layer_case.aux_dlogits = true;
  layer_case.seed = 3;
  Sample out;
  out.data = make_data(layer_case);
  out.layer.desc = out.data.desc;
  std::uint64_t seed = 100;
  auto const fill = [&seed](UniformTensor& tensor, std::vector<float>& values, float scale) {
    if (values.empty()) return;
    tensor = {++seed, scale};
    values = values_of(tensor, values.size());
  };
  UniformLayer& layer = out.layer;
  fill(layer.x, out.data.x, 1.7f);
  fill(layer.d_o, out.data.d_o, 1.7f);
  fill(layer.w_router, out.data.w_router, 0.3f);
  fill(layer.b_router, out.data.b_router, 1);
  fill(layer.aux_dlogits, out.data.aux_dlogits, 0.2f);
  fill(layer.w_up, out.data.w_up, 0.3f);
  fill(layer.w_gate, out.data.w_gate, 0.3f);
  fill(layer.w_down, out.data.w_down, 0.3f);
  fill(layer.b_up, out.data.b_up, 1);
  fill(layer.b_gate, out.data.b_gate, 1);
  fill(layer.b_down, out.data.b_down, 1);
  Context const context = std::move(Context::create()).value();
  auto result = run_candidate(context, out.data, kPoisons[0], Alignment::element);
  EXPECT_TRUE(result.ok()) << result.status().text();
  out.result = std::move(result.value());
  return out;
}

std::vector<float> slice(std::vector<float> const& values, std::int64_t first, std::int64_t count) {
  return {values.begin() + first, values.begin() + first + count};
}

TokenResult token_of(Sample const& sample, std::int64_t token) {
  MoeShape const& s = sample.layer.desc.shape;
  TokenResult out;
  out.token = token;
  for (std::int64_t j = token * s.top_k; j < (token + 1) * s.top_k; ++j) {
    out.ids.push_back(sample.result.choice.topk_ids[j]);
    out.scores.push_back(sample.result.tensors.at("scores")[j]);
    std::int64_t const width = sample.layer.desc.up_width() * s.intermediate;
    out.h.push_back(
        slice(sample.result.h, sample.result.metadata.inverse_permutation[j] * width, width));
  }
  out.o = slice(sample.result.tensors.at("o"), token * s.hidden, s.hidden);
  return out;
}

TokenGradients gradients_of(Sample const& sample, std::int64_t token) {
  MoeShape const& s = sample.layer.desc.shape;
  Tensors const& t = sample.result.tensors;
  return {slice(t.at("dx"), token * s.hidden, s.hidden),
          slice(t.at("dscores"), token * s.top_k, s.top_k),
          slice(t.at("dlogits"), token * s.experts, s.experts)};
}

UnitGradients unit_of(Sample const& sample, std::int64_t expert, std::int64_t i) {
  MoeShape const& s = sample.layer.desc.shape;
  auto const& meta = sample.result.metadata;
  UnitGradients out;
  out.expert = expert;
  out.i = i;
  for (std::int64_t r = meta.expert_offsets[expert]; r < meta.expert_offsets[expert + 1]; ++r) {
    out.tokens.push_back(meta.gather_index[r]);
    out.scores.push_back(sample.result.tensors.at("scores")[meta.sort_permutation[r]]);
    float const* const h = &sample.result.h[r * 2 * s.intermediate];
    out.h_gate.push_back(h[i]);
    out.h_up.push_back(h[s.intermediate + i]);
  }
  Tensors const& t = sample.result.tensors;
  bool const apart = sample.layer.desc.layout.orientation == WeightOrientation::separate;
  std::int64_t const up_size = (apart ? 1 : 2) * s.intermediate * s.hidden;
  for (std::int64_t c = 0; c < s.hidden; ++c) {
    using reference::Part;
    out.dw_gate.push_back(t.at(
        apart ? "dw_gate" : "dw_up")[expert * up_size + sample.layer.up_place(Part::gate, i, c)]);
    out.dw_up.push_back(t.at("dw_up")[expert * up_size + sample.layer.up_place(Part::up, i, c)]);
    out.dw_down.push_back(
        t.at("dw_down")[expert * s.intermediate * s.hidden + sample.layer.down_place(c, i)]);
  }
  return out;
}

class GradientCheck : public testing::TestWithParam<WeightOrientation> {
 protected:
  Context host_ = std::move(Context::create()).value();
};

TEST_P(GradientCheck, AcceptsTheLayer) {
  Sample const sample = make_sample({GateUpOrder::concat, GetParam()});
  MoeShape const& s = sample.layer.desc.shape;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    EXPECT_EQ(token_failure(host_, sample.layer, token_of(sample, t)), "");
    EXPECT_EQ(
        token_gradient_failure(host_, sample.layer, token_of(sample, t), gradients_of(sample, t)),
        "");
  }
  for (std::int64_t e = 0; e < s.experts; ++e) {
    EXPECT_EQ(unit_gradient_failure(host_, sample.layer, unit_of(sample, e, 7)), "");
  }
}

TEST_P(GradientCheck, RejectsWrongGradients) {
  Sample const sample = make_sample({GateUpOrder::concat, GetParam()});
  TokenResult const token = token_of(sample, 5);
  auto const failure = [&](auto&& change) {
    TokenGradients gradients = gradients_of(sample, 5);
    change(gradients);
    return token_gradient_failure(host_, sample.layer, token, gradients);
  };
  EXPECT_NE(failure([](TokenGradients& g) { g.dx[0] += 0.5f; }), "");
  EXPECT_NE(failure([&](TokenGradients& g) { g.dx = gradients_of(sample, 6).dx; }), "");
  EXPECT_NE(failure([&](TokenGradients& g) { g.dscores[1] *= token.scores[1]; }), "");
  EXPECT_NE(failure([](TokenGradients& g) { std::swap(g.dlogits[0], g.dlogits[1]); }), "");
  EXPECT_NE(failure([](TokenGradients& g) { g.dlogits.clear(); }), "");
  EXPECT_NE(failure([&](TokenGradients& g) {
              for (std::size_t e = 0; e < g.dlogits.size(); ++e) {
                g.dlogits[e] -= sample.data.aux_dlogits[5 * g.dlogits.size() + e];
              }
            }),
            "");

  UnitGradients const unit = unit_of(sample, token.ids[0], 7);
  ASSERT_FALSE(unit.tokens.empty());
  auto const unit_failure = [&](auto&& change) {
    UnitGradients gradients = unit;
    change(gradients);
    return unit_gradient_failure(host_, sample.layer, gradients);
  };
  EXPECT_NE(unit_failure([](UnitGradients& g) { std::swap(g.dw_gate, g.dw_up); }), "");
  EXPECT_NE(unit_failure([](UnitGradients& g) { g.dw_down.assign(g.dw_down.size(), 0); }), "");
  EXPECT_NE(unit_failure([](UnitGradients& g) { g.dw_down[3] *= 2; }), "");
}

INSTANTIATE_TEST_SUITE_P(Orientations, GradientCheck,
                         testing::Values(WeightOrientation::rows, WeightOrientation::transposed,
                                         WeightOrientation::separate),
                         [](auto const& info) {
                           return info.param == WeightOrientation::rows         ? "rows"
                                  : info.param == WeightOrientation::transposed ? "transposed"
                                                                                : "separate";
                         });

TEST(RouterRow, IsTheSumOverTokens) {
  Context const host = std::move(Context::create()).value();
  Sample const sample = make_sample({});
  MoeShape const& s = sample.layer.desc.shape;
  RouterRow row;
  row.expert = 2;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    row.dlogits.push_back(sample.result.tensors.at("dlogits")[t * s.experts + row.expert]);
  }
  row.dw_router = slice(sample.result.tensors.at("dw_router"), row.expert * s.hidden, s.hidden);
  row.db_router = sample.result.tensors.at("db_router")[row.expert];
  EXPECT_EQ(router_row_failure(host, sample.layer, row), "");
  RouterRow wrong = row;
  wrong.dw_router[1] += 1;
  EXPECT_NE(router_row_failure(host, sample.layer, wrong), "");
  wrong = row;
  *wrong.db_router *= 1.1f;
  EXPECT_NE(router_row_failure(host, sample.layer, wrong), "");
}

}  // namespace
}  // namespace tessera::verify
