// SPDX-License-Identifier: Apache-2.0
// s = c p (over a sum); dl by the chain rule (formulas: cpu/reference/route.cpp).
#include "verify/naive_router.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::verify {
namespace {

using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

/// p of each member.
Floats softmax(float const* logits, Ids const& members) {
  Floats p;
  if (members.empty()) return p;
  float largest = logits[members[0]];
  for (std::int64_t const e : members) largest = std::max(largest, logits[e]);
  float sum = 0;
  for (std::int64_t const e : members) {
    p.push_back(std::exp(logits[e] - largest));
    sum += p.back();
  }
  for (float& value : p) value /= sum;
  return p;
}

/// p of all experts, summed with the members first.
Floats softmax_over_all(MoeDesc const& desc, float const* logits, Ids const& members) {
  Ids order = members;
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    if (std::find(members.begin(), members.end(), e) == members.end()) order.push_back(e);
  }
  Floats const p = softmax(logits, order);
  Floats out(p.size());
  for (std::size_t i = 0; i < p.size(); ++i) out[order[i]] = p[i];
  return out;
}

bool has_own_p(RouterKind kind) {
  return kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
         kind == RouterKind::sqrtsoftplus;
}

bool has_softmax_over_all(RouterKind kind) {
  return kind == RouterKind::softmax_topk || kind == RouterKind::expert_choice;
}

float own_p(RouterKind kind, float l) {
  float const softplus = std::max(l, 0.0f) + std::log1p(std::exp(-std::abs(l)));
  return kind == RouterKind::sqrtsoftplus ? std::sqrt(softplus) : 1 / (1 + std::exp(-l));
}

float own_p_slope(RouterKind kind, float p) {
  if (kind != RouterKind::sqrtsoftplus) return p * (1 - p);
  return p == 0 ? 0 : (1 - std::exp(-p * p)) / (2 * p);
}

/// S that divides p.
float normalizer(MoeDesc const& desc, float const* logits, Ids const& members) {
  if (!desc.router.normalize_scores) return 1;
  float sum = 0;
  for (std::int64_t const e : members) sum += own_p(desc.router.kind, logits[e]);
  return sum + 1e-20f;
}

}  // namespace

Floats naive_unscaled_scores(MoeDesc const& desc, float const* logits, Ids const& members) {
  RouterKind const kind = desc.router.kind;
  Floats scores;
  if (has_own_p(kind)) {
    float const sum = normalizer(desc, logits, members);
    for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
      scores.push_back(own_p(kind, logits[e]) / sum);
    }
    return scores;
  }
  scores = softmax_over_all(desc, logits, members);
  if (has_softmax_over_all(kind)) return scores;
  Floats const q = softmax(logits, members);
  for (std::size_t k = 0; k < members.size(); ++k) scores[members[k]] = q[k];
  return scores;
}

Floats naive_logit_gradient(MoeDesc const& desc, float const* logits, Ids const& members,
                            Floats const& g) {
  RouterKind const kind = desc.router.kind;
  std::size_t const experts = g.size();
  Floats const score = naive_unscaled_scores(desc, logits, members);
  std::vector<char> member(experts, 0);
  float of_members = 0, of_others = 0;
  for (std::int64_t const e : members) {
    member[e] = 1;
    of_members += g[e] * score[e];
  }
  for (std::size_t e = 0; e < experts; ++e) of_others += member[e] ? 0 : g[e] * score[e];

  Floats dlogits(experts);
  if (has_own_p(kind)) {
    float const sum = normalizer(desc, logits, members);
    for (std::size_t e = 0; e < experts; ++e) {
      float const mean = member[e] && desc.router.normalize_scores ? of_members + of_others : 0;
      dlogits[e] = (g[e] - mean) / sum * own_p_slope(kind, own_p(kind, logits[e]));
    }
  } else if (has_softmax_over_all(kind)) {
    float const mean = of_members + of_others;
    for (std::size_t e = 0; e < experts; ++e) dlogits[e] = score[e] * (g[e] - mean);
  } else {
    Floats const p = softmax_over_all(desc, logits, members);
    for (std::size_t e = 0; e < experts; ++e) {
      dlogits[e] =
          member[e] ? score[e] * (g[e] - of_members) - p[e] * of_others : p[e] * (g[e] - of_others);
    }
  }
  return dlogits;
}

}  // namespace tessera::verify
