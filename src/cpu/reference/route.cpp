// SPDX-License-Identifier: Apache-2.0
// l_t = x_t w_router^T + b_router; I_t = the K largest keys, ties to the lower expert; scores and gradients:
//   topk_softmax, softmax_topk_renorm   q = softmax over I_t, s = c q,   dl_k = q_k (g_k - sum_I g q)
//   softmax_topk                        p = softmax over E,   s = c p,   dl_e = p_e (g_e [e in I] - sum_I g p)
// with g_k = c ds_k. Selection is not differentiated.
#include <algorithm>
#include <cmath>
#include <numeric>

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

}  // namespace

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

std::vector<std::int64_t> select_experts(MoeDesc const& desc, Values const& logits) {
  MoeShape const& s = desc.shape;
  std::vector<std::int64_t> topk_ids, order(s.experts);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    double const* const key = &logits[t * s.experts];
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [key](std::int64_t a, std::int64_t b) {
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
    Values const p = softmax(&logits[t * s.experts], softmax_members(desc, &topk_ids[t * s.top_k]));
    for (std::int64_t k = 0; k < s.top_k; ++k) scores.push_back(desc.router.route_scale * p[k]);
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
    auto const members = softmax_members(desc, &inputs.topk_ids[t * s.top_k]);
    Values const p = softmax(&f.logits[t * s.experts], members);
    Values g(members.size(), 0);
    double mean = 0;
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      g[k] = desc.router.route_scale * b.dscores[t * s.top_k + k];
      mean += g[k] * p[k];
    }
    for (std::size_t m = 0; m < members.size(); ++m) {
      std::int64_t const e = members[m];
      double const dlogit = p[m] * (g[m] - mean);
      b.dlogits[t * s.experts + e] = dlogit;
      b.db_router[e] += dlogit;
      add_scaled(dlogit, &inputs.x[t * s.hidden], s.hidden, &b.dw_router[e * s.hidden]);
      add_scaled(dlogit, &inputs.w_router[e * s.hidden], s.hidden, &b.dx[t * s.hidden]);
    }
  }
}

}  // namespace tessera::reference
