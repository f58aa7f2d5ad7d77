// SPDX-License-Identifier: Apache-2.0
// s = c p (over a sum); dl by the chain rule (formulas: cpu/reference/route.cpp).
#include "verify/naive_router.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::verify {
namespace {

using Floats = std::vector<float>;

/// Members of a softmax and their probabilities; the chosen experts come first.
struct Softmax {
  std::vector<std::int64_t> members;
  Floats p;
};

Softmax softmax(MoeDesc const& desc, float const* logits, std::int64_t const* chosen) {
  std::int64_t const top_k = desc.shape.top_k;
  Softmax out{{chosen, chosen + top_k}, {}};
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    bool const outside = std::find(chosen, chosen + top_k, e) == chosen + top_k;
    if (desc.router.kind == RouterKind::softmax_topk && outside) out.members.push_back(e);
  }
  float largest = logits[chosen[0]];
  for (std::int64_t const e : out.members) largest = std::max(largest, logits[e]);
  float sum = 0;
  for (std::int64_t const e : out.members) {
    out.p.push_back(std::exp(logits[e] - largest));
    sum += out.p.back();
  }
  for (float& value : out.p) value /= sum;
  return out;
}

bool is_softmax(RouterKind kind) {
  return kind == RouterKind::topk_softmax || kind == RouterKind::softmax_topk ||
         kind == RouterKind::softmax_topk_renorm;
}

/// p of the chosen experts and the S that divides them.
struct OwnP {
  Floats p;
  float sum = 1;
};

OwnP own_p(MoeDesc const& desc, float const* logits, std::int64_t const* chosen) {
  OwnP out;
  for (std::int64_t k = 0; k < desc.shape.top_k; ++k) {
    float const l = logits[chosen[k]];
    float const softplus = std::max(l, 0.0f) + std::log1p(std::exp(-std::abs(l)));
    out.p.push_back(desc.router.kind == RouterKind::sqrtsoftplus ? std::sqrt(softplus)
                                                                 : 1 / (1 + std::exp(-l)));
  }
  if (desc.router.normalize_scores) {
    out.sum = std::accumulate(out.p.begin(), out.p.end(), 0.0f) + 1e-20f;
  }
  return out;
}

}  // namespace

Floats naive_scores(MoeDesc const& desc, float const* logits, std::int64_t const* chosen) {
  Floats scores;
  bool const over_all = is_softmax(desc.router.kind);
  OwnP const own = over_all ? OwnP{softmax(desc, logits, chosen).p} : own_p(desc, logits, chosen);
  for (std::int64_t k = 0; k < desc.shape.top_k; ++k) {
    scores.push_back(desc.router.route_scale * (own.p[k] / own.sum));
  }
  return scores;
}

Floats naive_logit_gradient(MoeDesc const& desc, float const* logits, std::int64_t const* chosen,
                            float const* dscores) {
  MoeShape const& s = desc.shape;
  Floats dlogits(s.experts);
  float mean = 0;
  if (is_softmax(desc.router.kind)) {
    Softmax const all = softmax(desc, logits, chosen);
    Floats g(all.members.size());
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      g[k] = desc.router.route_scale * dscores[k];
      mean += g[k] * all.p[k];
    }
    for (std::size_t m = 0; m < g.size(); ++m) dlogits[all.members[m]] = all.p[m] * (g[m] - mean);
    return dlogits;
  }
  OwnP const own = own_p(desc, logits, chosen);
  for (std::int64_t k = 0; k < s.top_k && desc.router.normalize_scores; ++k) {
    mean += desc.router.route_scale * dscores[k] * (own.p[k] / own.sum);
  }
  for (std::int64_t k = 0; k < s.top_k; ++k) {
    float const dp = (desc.router.route_scale * dscores[k] - mean) / own.sum;
    float const p = own.p[k];
    float slope = p * (1 - p);
    if (desc.router.kind == RouterKind::sqrtsoftplus) {
      slope = p == 0 ? 0 : (1 - std::exp(-p * p)) / (2 * p);
    }
    dlogits[chosen[k]] = dp * slope;
  }
  return dlogits;
}

}  // namespace tessera::verify
