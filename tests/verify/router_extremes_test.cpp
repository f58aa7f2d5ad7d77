// SPDX-License-Identifier: Apache-2.0
// Routers and their losses where logits and gradients are as large as fp32 has them, and where all p are 0: finite
// values give what the formulas give in fp64, never NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/balance.hpp"
#include "tests/verify/support.hpp"
#include "verify/candidate.hpp"

namespace tessera::verify {
namespace {

constexpr std::uint32_t kNan = 0x7fc00000u;
constexpr float kHuge = 3e38f;

/// Below it p has lost its accuracy, and may count as 0: the smallest normal number, or its root's neighbourhood.
double least_p(RouterKind kind) { return kind == RouterKind::sqrtsoftplus ? 0x1p-74 : FLT_MIN; }

/// Logits of five experts, with which x has next to nothing to do.
std::vector<std::vector<float>> patterns() {
  return {{-1000, -1000, -1000, -1000, -1000},  {-kHuge, -kHuge, -kHuge, -kHuge, -kHuge},
          {kHuge, kHuge, kHuge, kHuge, kHuge},  {kHuge, -kHuge, 0, -kHuge, kHuge},
          {kHuge, 0.5f, -0.5f, 1e-40f, -kHuge}, {-95, -100, -87.5f, -103, -200},
          {1e20f, -1e20f, 1e-20f, -1e-20f, 0},  {88, 89, 90, -88, 200},
          {-46, -60, -88, -46, -1e30f}};
}

std::string text(RouterKind kind, bool normalized, float scale, std::size_t pattern) {
  return "router " + std::to_string(static_cast<int>(kind)) + (normalized ? ", normalized" : "") +
         ", scale " + std::to_string(scale) + ", pattern " + std::to_string(pattern);
}

/// `lost`: what the least p is worth in the result.
void expect_near(std::vector<float> const& got, std::vector<double> const& right, char const* what,
                 double lost) {
  ASSERT_EQ(got.size(), right.size());
  double largest = 0;
  for (double const value : right) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const bounded = std::clamp<double>(right[i], -FLT_MAX, FLT_MAX);
    double const value = std::clamp<double>(got[i], -FLT_MAX, FLT_MAX);
    ASSERT_FALSE(std::isnan(got[i])) << what << " " << i << ", not " << right[i];
    ASSERT_NEAR(value, bounded,
                2e-4 * std::abs(bounded) + 2e-5 * std::min<double>(largest, FLT_MAX) + lost)
        << what << " " << i;
  }
}

TEST(RouterExtremes, ScoresAndGradientsAreTheReferences) {
  Context const context = std::move(Context::create()).value();
  for (RouterKind const kind :
       {RouterKind::topk_softmax, RouterKind::softmax_topk_renorm, RouterKind::softmax_topk,
        RouterKind::sigmoid_bias, RouterKind::sqrtsoftplus, RouterKind::group_limited}) {
    bool const has_own = kind >= RouterKind::sigmoid_bias;
    for (bool const normalized : {false, true}) {
      if (normalized && !has_own) continue;
      for (float const scale : {1.0f, 1e19f, 1e-30f}) {
        for (std::size_t pattern = 0; pattern < patterns().size(); ++pattern) {
          SCOPED_TRACE(text(kind, normalized, scale, pattern));
          LayerCase layer_case = small_case(kind);
          layer_case.desc.router.normalize_scores = normalized;
          layer_case.desc.router.route_scale = scale;
          if (kind == RouterKind::group_limited) {
            layer_case.desc.router.groups = 5;
            layer_case.desc.router.top_groups = 3;
          }
          LayerData data = make_data(layer_case);
          ASSERT_EQ(data.b_router.size(), 5U);
          std::copy_n(patterns()[pattern].begin(), 5, data.b_router.begin());
          std::fill(data.w_router.begin(), data.w_router.end(), 0.0f);
          auto const run = run_candidate(context, data, kNan, Alignment::element);
          ASSERT_TRUE(run.ok()) << run.status().text();
          auto const inputs = reference_inputs(data, run.value().choice);
          auto const forward = reference::forward(inputs);
          auto const backward =
              reference::backward(inputs, forward, {data.d_o.begin(), data.d_o.end()});
          auto const& tensors = run.value().tensors;
          double const lost = least_p(kind) * (1.0 + scale) * (normalized ? 1e20 : 1);
          expect_near(tensors.at("scores"), forward.scores, "score", lost);
          // Where S is no more than the sum of p its floor counts for nothing: one part in 2^23 of g.
          double g = 0;
          for (double const ds : backward.dscores) g = std::max(g, scale * std::abs(ds));
          expect_near(tensors.at("dlogits"), backward.dlogits, "dlogit", 10 * lost + 0x1p-22 * g);
        }
      }
    }
  }
}

struct Loss {
  long double balance = 0, z = 0;
  std::vector<double> dlogits;
};

/// Of one token, in long double; counts and S as the call below has them.
Loss exact_loss(RouterKind kind, std::vector<float> const& logits,
                std::vector<std::int32_t> const& counts, float balance, float z) {
  using Real = long double;
  bool const has_own = kind >= RouterKind::sigmoid_bias;
  std::size_t const experts = logits.size();
  Real const largest = *std::max_element(logits.begin(), logits.end());
  Real sum = 0, count_sum = 0;
  for (float const l : logits) sum += std::exp(Real{l} - largest);
  for (std::int32_t const f : counts) count_sum += f;
  Real const lse = largest + std::log(sum);
  std::vector<Real> p, slope, softmax, cost;
  for (std::size_t e = 0; e < experts; ++e) {
    Real const l = logits[e];
    softmax.push_back(std::exp(l - largest) / sum);
    cost.push_back(Real{balance} * static_cast<Real>(experts) * counts[e] / count_sum);
    if (kind == RouterKind::sqrtsoftplus) {
      p.push_back(std::sqrt(std::max(l, Real{0}) + std::log1p(std::exp(-std::abs(l)))));
      slope.push_back(p[e] == 0 ? 0 : -std::expm1(-p[e] * p[e]) / (2 * p[e]));
    } else {
      p.push_back(1 / (1 + std::exp(-l)));
      slope.push_back(p[e] * (1 / (1 + std::exp(l))));
    }
  }
  Real divisor = 1e-20L;
  for (Real const value : p) divisor += value;
  Loss out;
  for (std::size_t e = 0; e < experts; ++e)
    out.balance += cost[e] * (has_own ? p[e] / divisor : softmax[e]);
  out.z = Real{z} * lse * lse;
  for (std::size_t e = 0; e < experts; ++e) {
    Real const centered = cost[e] - out.balance;
    Real const of_balance = has_own ? slope[e] / divisor * centered : softmax[e] * centered;
    out.dlogits.push_back(static_cast<double>(of_balance + 2 * Real{z} * lse * softmax[e]));
  }
  return out;
}

TEST(RouterExtremes, LossesAreThoseOfTheFormulas) {
  Context const context = std::move(Context::create()).value();
  std::vector<std::int32_t> const counts{3, 0, 1, 2, 7};
  for (RouterKind const kind : {RouterKind::topk_softmax, RouterKind::softmax_topk,
                                RouterKind::sigmoid_bias, RouterKind::sqrtsoftplus}) {
    for (auto const& [balance, z] :
         {std::pair{1.0f, 0.0f}, {0.0f, 1.0f}, {0.0f, 1e-3f}, {1e18f, 0.0f}, {0.5f, 2.0f}}) {
      for (std::size_t pattern = 0; pattern < patterns().size(); ++pattern) {
        SCOPED_TRACE(text(kind, false, balance, pattern) + ", z " + std::to_string(z));
        std::vector<float> const logits = patterns()[pattern];
        MoeDesc desc;
        desc.shape = {.tokens = 1, .hidden = 8, .intermediate = 8, .experts = 5, .top_k = 2};
        desc.router.kind = kind;
        std::vector<float> losses(2, NAN), dlogits(5, NAN);
        std::vector<char> workspace(router_loss_workspace_bytes(context, desc).value());
        RouterLossArgs args;
        args.logits = tensor(logits.data(), {1, 5});
        args.topk_counts = tensor(counts.data(), {5});
        args.balance = balance;
        args.z = z;
        args.losses = tensor(losses.data(), {2});
        args.dlogits = tensor(dlogits.data(), {1, 5});
        args.workspace = {workspace.data(), workspace.size()};
        Status const status = router_loss(context, desc, args);
        ASSERT_TRUE(status.ok()) << status.text();
        double const lost = least_p(kind) * 1e20 * (1.0 + balance);
        Loss const right = exact_loss(kind, logits, counts, balance, z);
        expect_near({losses[0]}, {static_cast<double>(right.balance)}, "load balancing", lost);
        expect_near({losses[1]}, {static_cast<double>(right.z)}, "z", FLT_MIN);
        expect_near(dlogits, right.dlogits, "dlogit", lost);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::verify
