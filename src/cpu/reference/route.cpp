// SPDX-License-Identifier: Apache-2.0
// l_t = x_t w_router^T + b_router; I_t = the K largest keys, ties to the lower expert; F_t = the experts of the token's
// slots (I_t, unless tokens are rounded); with g_e = c ds_e for e in F:
//   topk_softmax, softmax_topk_renorm   key l, q = softmax over I, p = softmax over E; s = c q in I, c p for the added
//                                       dl_e = [e in I] q_e (g_e - sum_{I and F} g q)
//                                              + p_e (g_e [e added] - sum_added g p)
//   softmax_topk, expert_choice         key l, s = c p, dl_e = p_e (g_e - sum_F g p)
//   sigmoid_bias, group_limited         p = sigmoid(l), key p + beta; normalised s = c p/S with S = sum_I p + 1e-20,
//                                       dp_e = (g_e - [e in I] sum_F g q)/S, q = p/S; else s = c p, dp_e = g_e
//                                       dl_e = dp_e p_e (1 - p_e)
//   sqrtsoftplus                        p = sqrt(log(1+e^l)), the rest as above, dl_e = dp_e (1 - e^(-p^2)) / (2 p)
// g_e = 0 outside F: a dropped expert stays in the softmax and in S.
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
  Values p;
  if (members.empty()) return p;
  double largest = logits[members.front()];
  for (std::int64_t const e : members) largest = std::max(largest, logits[e]);
  for (std::int64_t const e : members) p.push_back(std::exp(logits[e] - largest));
  double const sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

bool has_own_p(RouterKind kind) {
  return kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
         kind == RouterKind::sqrtsoftplus;
}

bool has_softmax_over_all(RouterKind kind) {
  return kind == RouterKind::softmax_topk || kind == RouterKind::expert_choice;
}

double own_p(RouterKind kind, double logit) {
  if (kind != RouterKind::sqrtsoftplus) return 1 / (1 + std::exp(-logit));
  return std::sqrt(std::max(logit, 0.0) + std::log1p(std::exp(-std::abs(logit))));
}

double own_p_slope(RouterKind kind, double p) {
  if (kind != RouterKind::sqrtsoftplus) return p * (1 - p);
  return p == 0 ? 0 : -std::expm1(-p * p) / (2 * p);
}

/// S of the normalised scores, 1 where they are not.
double normalizer(Router const& router, double const* logits,
                  std::vector<std::int64_t> const& members) {
  if (!router.normalize_scores) return 1;
  double sum = 1e-20;
  for (std::int64_t const e : members) sum += own_p(router.kind, logits[e]);
  return sum;
}

/// dlogits [E] of one token: g [E] is 0 outside F.
Values logit_gradient(MoeDesc const& desc, double const* logits,
                      std::vector<std::int64_t> const& members, Values const& g) {
  std::int64_t const experts = desc.shape.experts;
  RouterKind const kind = desc.router.kind;
  Values const score = unscaled_scores(desc, logits, members);
  std::vector<char> member(experts, 0);
  for (std::int64_t const e : members) member[e] = 1;
  double of_members = 0, of_others = 0;
  for (std::int64_t e = 0; e < experts; ++e)
    (member[e] ? of_members : of_others) += g[e] * score[e];

  Values dlogits(experts, 0);
  if (has_own_p(kind)) {
    double const sum = normalizer(desc.router, logits, members);
    for (std::int64_t e = 0; e < experts; ++e) {
      double const mean = member[e] && desc.router.normalize_scores ? of_members + of_others : 0;
      dlogits[e] = (g[e] - mean) / sum * own_p_slope(kind, own_p(kind, logits[e]));
    }
  } else if (has_softmax_over_all(kind)) {
    for (std::int64_t e = 0; e < experts; ++e) {
      dlogits[e] = score[e] * (g[e] - of_members - of_others);
    }
  } else {
    Values const p = unscaled_scores(desc, logits, {});
    for (std::int64_t e = 0; e < experts; ++e) {
      dlogits[e] =
          member[e] ? score[e] * (g[e] - of_members) - p[e] * of_others : p[e] * (g[e] - of_others);
    }
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

Values unscaled_scores(MoeDesc const& desc, double const* logits,
                       std::vector<std::int64_t> const& members) {
  std::vector<std::int64_t> all(desc.shape.experts);
  std::iota(all.begin(), all.end(), 0);
  RouterKind const kind = desc.router.kind;
  if (has_own_p(kind)) {
    Values scores;
    double const sum = normalizer(desc.router, logits, members);
    for (std::int64_t const e : all) scores.push_back(own_p(kind, logits[e]) / sum);
    return scores;
  }
  Values scores = softmax(logits, all);
  if (has_softmax_over_all(kind)) return scores;
  Values const q = softmax(logits, members);
  for (std::size_t k = 0; k < members.size(); ++k) scores[members[k]] = q[k];
  return scores;
}

std::vector<std::int64_t> members_of(Inputs const& inputs, Metadata const& metadata,
                                     std::int64_t token) {
  std::int64_t const top_k = inputs.desc.shape.top_k;
  if (inputs.desc.rounds_tokens()) {
    auto const first = inputs.unrounded_ids.begin() + token * top_k;
    return {first, first + top_k};
  }
  std::vector<std::int64_t> members;
  for (std::int64_t j = metadata.token_offsets[token]; j < metadata.token_offsets[token + 1]; ++j) {
    std::int64_t const id = inputs.topk_ids[j];
    bool const known = std::find(members.begin(), members.end(), id) != members.end();
    if (id >= 0 && id < inputs.desc.shape.experts && !known) members.push_back(id);
  }
  return members;
}

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

std::vector<char> eligible_pairs(MoeDesc const& desc, Values const& keys) {
  std::vector<char> eligible;
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    for (double const key : masked_keys(desc, &keys[t * desc.shape.experts])) {
      eligible.push_back(key == -std::numeric_limits<double>::infinity() ? 0 : 1);
    }
  }
  return eligible;
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

PairScores pair_scores(Inputs const& inputs, Values const& logits) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const experts = desc.shape.experts, top_k = desc.shape.top_k;
  PairScores pairs{{}, eligible_pairs(desc, router_keys(inputs, logits)), inputs.unrounded_ids};
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    std::vector<std::int64_t> members;
    if (desc.rounds_tokens()) {
      auto const first = inputs.unrounded_ids.begin() + t * top_k;
      members.assign(first, first + top_k);
    }
    Values const row = unscaled_scores(desc, &logits[t * experts], members);
    pairs.scores.insert(pairs.scores.end(), row.begin(), row.end());
  }
  return pairs;
}

Values router_scores(Inputs const& inputs, Metadata const& metadata, Values const& logits) {
  MoeDesc const& desc = inputs.desc;
  Values scores(inputs.topk_ids.size(), 0);
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    Values const own =
        unscaled_scores(desc, &logits[t * desc.shape.experts], members_of(inputs, metadata, t));
    for (std::int64_t j = metadata.token_offsets[t]; j < metadata.token_offsets[t + 1]; ++j) {
      if (metadata.inverse_permutation[j] < 0) continue;
      scores[j] = desc.router.route_scale * own[inputs.topk_ids[j]];
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
    Values g(s.experts, 0);
    for (std::int64_t j = f.metadata.token_offsets[t]; j < f.metadata.token_offsets[t + 1]; ++j) {
      if (f.metadata.inverse_permutation[j] < 0) continue;
      g[inputs.topk_ids[j]] += desc.router.route_scale * b.dscores[j];
    }
    Values row =
        logit_gradient(desc, &f.logits[t * s.experts], members_of(inputs, f.metadata, t), g);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      if (!inputs.aux_dlogits.empty()) row[e] += inputs.aux_dlogits[t * s.experts + e];
      b.dlogits[t * s.experts + e] = row[e];
      b.db_router[e] += row[e];
      add_scaled(row[e], &inputs.x[t * s.hidden], s.hidden, &b.dw_router[e * s.hidden]);
      add_scaled(row[e], &inputs.w_router[e * s.hidden], s.hidden, &b.dx[t * s.hidden]);
    }
  }
}

}  // namespace tessera::reference
