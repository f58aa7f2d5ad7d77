// SPDX-License-Identifier: Apache-2.0
// The formulas of the routers, token by token: keys, scores and gradients.
//
//   router                      key (per expert)      score of a chosen k (c = route scale)
//   topk-softmax, -renorm       l                     c*q_k, q = softmax over the chosen
//   softmax-topk                l                     c*p_k, p = softmax over all experts
//   sigmoid-bias                p + beta, p = sig(l)  c*p_k, or c*p_k/S with S = sum of chosen p + 1e-20
//   sqrtsoftplus                p + beta, p = sqrt(log(1+e^l)), scores as above
//   group-limited               as sigmoid-bias inside the kept groups; a group counts the sum of its two
//                               largest keys, ties keep the lower group
//   expert-choice               experts choose by p       c*p_k, p = softmax over all experts
// beta (selection_bias) is added to every key; ties take the lower expert, NaN ranks above all numbers.
// Experts beyond the top-k choice that token rounding adds: c*p, p = softmax over all; p of their own as above.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fp32_math.hpp"
#include "core/router_groups.hpp"
#include "core/router_math.hpp"
#include "tessera/shape.hpp"

namespace tessera::cpu {

using core::has_own_p;
using core::has_softmax_over_all;
using core::kNormalizeFloor;
using core::own_p;
using core::own_p_gradient;

/// Behind every selection_key.
inline constexpr std::uint64_t kMaskedKey = ~std::uint64_t{0};

/// Ascending order of these integers = descending key, then ascending expert.
inline std::uint64_t selection_key(float key, std::int64_t expert) noexcept {
  return std::uint64_t{~core::ordered_key(key)} << 32 | static_cast<std::uint64_t>(expert);
}

/// Experts outside the kept groups get keys behind every other. `keys` [E] as selection_key made them;
/// `values` [E] are the fp32 keys; `group_keys` has space for one key per group.
inline void mask_groups(MoeDesc const& desc, float const* values, std::uint64_t* keys,
                        std::uint64_t* group_keys) noexcept {
  auto const [groups, top_groups] = core::router_groups(desc);
  std::int64_t const size = desc.shape.experts / groups;
  for (std::int64_t g = 0; g < groups; ++g) {
    std::uint64_t first = ~std::uint64_t{0}, second = ~std::uint64_t{0};
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (keys[e] < first) {
        second = first;
        first = keys[e];
      } else if (keys[e] < second) {
        second = keys[e];
      }
    }
    float const largest = values[static_cast<std::uint32_t>(first)];
    float const sum = size == 1 ? largest : largest + values[static_cast<std::uint32_t>(second)];
    group_keys[g] = selection_key(sum, g);
  }
  std::partial_sort(group_keys, group_keys + top_groups, group_keys + groups);
  for (std::int64_t i = top_groups; i < groups; ++i) {
    auto const g = static_cast<std::int64_t>(static_cast<std::uint32_t>(group_keys[i]));
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) keys[e] = kMaskedKey;
  }
}

/// out[i] = exp(logits[i] - largest), returns their sum; the softmax is out[i] / sum.
inline float softmax_terms(float const* logits, std::int64_t count, float* out) noexcept {
  float largest = logits[0];
  for (std::int64_t i = 1; i < count; ++i) largest = largest > logits[i] ? largest : logits[i];
  for (std::int64_t i = 0; i < count; ++i) out[i] = core::exp_fp32(logits[i] - largest);
  return core::warp_sum(out, count);
}

/// Scores with c = 1 of the chosen experts `ids`; returns what they were divided by. `terms` has space for E. Routers
/// with a p of their own also leave it in chosen_p, unless null.
inline float unscaled_scores(MoeDesc const& desc, float const* logits, std::int32_t const* ids,
                             std::int64_t count, float* terms, float* scores,
                             float* chosen_p) noexcept {
  RouterKind const kind = desc.router.kind;
  float sum = 1.0f;
  if (has_softmax_over_all(kind)) {
    sum = softmax_terms(logits, desc.shape.experts, terms);
    for (std::int64_t k = 0; k < count; ++k) scores[k] = terms[ids[k]];
  } else if (has_own_p(kind)) {
    for (std::int64_t k = 0; k < count; ++k) scores[k] = own_p(kind, logits[ids[k]]);
    if (chosen_p != nullptr) std::copy_n(scores, count, chosen_p);
    if (desc.router.normalize_scores) sum = core::warp_sum(scores, count) + kNormalizeFloor;
  } else if (count > 0) {
    for (std::int64_t k = 0; k < count; ++k) scores[k] = logits[ids[k]];
    sum = softmax_terms(scores, count, scores);
  }
  for (std::int64_t k = 0; k < count; ++k) scores[k] = scores[k] / sum;
  return sum;
}

}  // namespace tessera::cpu
