// SPDX-License-Identifier: Apache-2.0
// l_t = x_t w_router^T + b_router; I_t = the K largest keys, ties to the lower expert; with g_k = c ds_k:
//   topk_softmax, softmax_topk_renorm   key l, q = softmax over I_t, s = c q,   dl_k = q_k (g_k - sum_I g q)
//   softmax_topk                        key l, p = softmax over E,   s = c p,   dl_e = p_e (g_e [e in I] - sum_I g p)
//   sigmoid_bias, group_limited         p = sigmoid(l), key p + beta; s = c p_k/S with S = sum_I p + 1e-20 where
//                                       normalised: dp_k = (g_k - sum_I g q)/S, q = p/S; else s = c p_k, dp_k = g_k
//                                       dl_k = dp_k p_k (1 - p_k)
//   sqrtsoftplus                        p = sqrt(log(1+e^l)), the rest as above, dl_k = dp_k (1 - e^(-p^2)) / (2 p)
// group_limited keeps the groups with the largest sums of their two largest keys (ties: lower group).
// Selection is not differentiated.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "core/router_groups.hpp"
#include "cpu/reference/layer.hpp"

namespace tessera::reference {
namespace {

/// softmax of `logits` over `members`.
Values softmax(double const* logits, std::vector<std::int64_t> const& members) {
  double largest = logits[members.front()];
  for (std::int64_t const e : members) largest = std::max(largest, logits[e]);
  Values p;
  for (std::int64_t const e : members) p.push_back(std::exp(logits[e] - largest));
  double const sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

/// The experts over which a router's softmax of one token runs, the chosen ones first.
std::vector<std::int64_t> softmax_members(MoeDesc const& desc, std::int64_t const* chosen) {
  std::vector<std::int64_t> members(chosen, chosen + desc.shape.top_k);
  if (desc.router.kind == RouterKind::softmax_topk) {
    for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
      if (std::find(chosen, chosen + desc.shape.top_k, e) == chosen + desc.shape.top_k) {
        members.push_back(e);
      }
    }
  }
  return members;
}

bool has_own_p(RouterKind kind) {
  return kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
         kind == RouterKind::sqrtsoftplus;
}

double own_p(RouterKind kind, double logit) {
  if (kind != RouterKind::sqrtsoftplus) return 1 / (1 + std::exp(-logit));
  return std::sqrt(std::max(logit, 0.0) + std::log1p(std::exp(-std::abs(logit))));
}

/// S of the normalised scores, 1 where they are not.
double normalizer(Router const& router, Values const& chosen_p) {
  if (!router.normalize_scores) return 1;
  return std::accumulate(chosen_p.begin(), chosen_p.end(), 0.0) + 1e-20;
}

Values chosen_p(MoeDesc const& desc, double const* logits, std::int64_t const* chosen) {
  Values p;
  for (std::int64_t k = 0; k < desc.shape.top_k; ++k) {
    p.push_back(own_p(desc.router.kind, logits[chosen[k]]));
  }
  return p;
}

/// dlogits [E] of one token.
Values logit_gradient(MoeDesc const& desc, double const* logits, std::int64_t const* chosen,
                      double const* dscores) {
  MoeShape const& s = desc.shape;
  Values dlogits(s.experts, 0);
  double mean = 0;
  if (!has_own_p(desc.router.kind)) {
    auto const members = softmax_members(desc, chosen);
    Values const p = softmax(logits, members);
    Values g(members.size(), 0);
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      g[k] = desc.router.route_scale * dscores[k];
      mean += g[k] * p[k];
    }
    for (std::size_t m = 0; m < members.size(); ++m) dlogits[members[m]] = p[m] * (g[m] - mean);
    return dlogits;
  }
  Values const p = chosen_p(desc, logits, chosen);
  double const sum = normalizer(desc.router, p);
  for (std::int64_t k = 0; k < s.top_k && desc.router.normalize_scores; ++k) {
    mean += desc.router.route_scale * dscores[k] * p[k] / sum;
  }
  for (std::int64_t k = 0; k < s.top_k; ++k) {
    double const dp = (desc.router.route_scale * dscores[k] - mean) / sum;
    double const slope = desc.router.kind != RouterKind::sqrtsoftplus ? p[k] * (1 - p[k])
                         : p[k] == 0                                  ? 0
                                     : -std::expm1(-p[k] * p[k]) / (2 * p[k]);
    dlogits[chosen[k]] = dp * slope;
  }
  return dlogits;
}

/// The keys [E] of one token with -inf for experts outside the groups that it keeps.
Values masked_keys(MoeDesc const& desc, double const* keys) {
  Values masked(keys, keys + desc.shape.experts);
  if (desc.router.kind != RouterKind::group_limited) return masked;
  auto const [groups, top_groups] = core::router_groups(desc);
  std::int64_t const size = desc.shape.experts / groups;
  Values const sums = group_sums(desc, keys);
  std::vector<std::int64_t> order(groups);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return sums[a] > sums[b]; });
  for (std::int64_t i = top_groups; i < groups; ++i) {
    std::fill_n(masked.begin() + order[i] * size, size, -std::numeric_limits<double>::infinity());
  }
  return masked;
}

}  // namespace

Values group_sums(MoeDesc const& desc, double const* keys) {
  std::int64_t const groups = core::router_groups(desc).groups, size = desc.shape.experts / groups;
  Values sums;
  for (std::int64_t g = 0; g < groups; ++g) {
    Values own(keys + g * size, keys + (g + 1) * size);
    std::sort(own.begin(), own.end(), std::greater<>());
    sums.push_back(size == 1 ? own[0] : own[0] + own[1]);
  }
  return sums;
}

Values router_keys(Inputs const& inputs, Values const& logits) {
  MoeDesc const& desc = inputs.desc;
  MoeShape const& s = desc.shape;
  Values keys = logits;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    double* const row = &keys[t * s.experts];
    for (std::int64_t e = 0; e < s.experts; ++e) {
      if (has_own_p(desc.router.kind)) row[e] = own_p(desc.router.kind, row[e]);
      if (!inputs.selection_bias.empty()) row[e] += inputs.selection_bias[e];
    }
  }
  return keys;
}

Values router_logits(Inputs const& inputs) {
  MoeShape const& s = inputs.desc.shape;
  Values logits(s.tokens * s.experts);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t e = 0; e < s.experts; ++e) {
      logits[t * s.experts + e] =
          dot(&inputs.x[t * s.hidden], &inputs.w_router[e * s.hidden], s.hidden) +
          (inputs.b_router.empty() ? 0 : inputs.b_router[e]);
    }
  }
  return logits;
}

std::vector<std::int64_t> select_experts(MoeDesc const& desc, Values const& keys) {
  MoeShape const& s = desc.shape;
  std::vector<std::int64_t> topk_ids, order(s.experts);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    Values const key = masked_keys(desc, &keys[t * s.experts]);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&key](std::int64_t a, std::int64_t b) {
      return std::isnan(key[a]) ? !std::isnan(key[b]) : key[a] > key[b];
    });
    topk_ids.insert(topk_ids.end(), order.begin(), order.begin() + s.top_k);
  }
  return topk_ids;
}

Values router_scores(MoeDesc const& desc, Values const& logits,
                     std::vector<std::int64_t> const& topk_ids) {
  MoeShape const& s = desc.shape;
  Values scores;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    double const* const row = &logits[t * s.experts];
    std::int64_t const* const chosen = &topk_ids[t * s.top_k];
    Values p;
    double sum = 1;
    if (has_own_p(desc.router.kind)) {
      p = chosen_p(desc, row, chosen);
      sum = normalizer(desc.router, p);
    } else {
      p = softmax(row, softmax_members(desc, chosen));
    }
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      scores.push_back(desc.router.route_scale * (p[k] / sum));
    }
  }
  return scores;
}

void router_backward(Inputs const& inputs, Forward const& f, Backward& b) {
  MoeDesc const& desc = inputs.desc;
  MoeShape const& s = desc.shape;
  b.dlogits.assign(s.tokens * s.experts, 0);
  b.dw_router.assign(s.experts * s.hidden, 0);
  b.db_router.assign(s.experts, 0);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    Values const row = logit_gradient(desc, &f.logits[t * s.experts], &inputs.topk_ids[t * s.top_k],
                                      &b.dscores[t * s.top_k]);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      b.dlogits[t * s.experts + e] = row[e];
      b.db_router[e] += row[e];
      add_scaled(row[e], &inputs.x[t * s.hidden], s.hidden, &b.dw_router[e * s.hidden]);
      add_scaled(row[e], &inputs.w_router[e * s.hidden], s.hidden, &b.dx[t * s.hidden]);
    }
  }
}

}  // namespace tessera::reference
