// SPDX-License-Identifier: Apache-2.0
// l = x w_router^T + b_router; I_t = the K experts with the largest keys; scores by router_formula.hpp.
//
// Every exp, log and sum is one fixed fp32 sequence: for equal logits the scores are equal bit for bit on
// every device.
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/router_formula.hpp"

namespace tessera::cpu {
namespace {

void store_id(Selection const& out, std::int64_t token, std::int64_t k,
              std::int64_t expert) noexcept {
  std::int64_t const at = token * out.ids_pitch + k;
  if (out.ids_dtype == DType::int64) {
    static_cast<std::int64_t*>(out.ids)[at] = expert;
  } else {
    static_cast<std::int32_t*>(out.ids)[at] = static_cast<std::int32_t>(expert);
  }
}

/// Memory of one token's selection.
struct Scratch {
  std::uint64_t* keys;        ///< [E]
  std::uint64_t* group_keys;  ///< [E] at most
  float* values;              ///< [E] fp32 keys, then softmax terms
};

/// The K smallest keys come first in scratch.keys.
void choose(MoeDesc const& desc, float const* logits, float const* selection_bias,
            Scratch const& scratch) noexcept {
  std::int64_t const experts = desc.shape.experts;
  for (std::int64_t e = 0; e < experts; ++e) {
    float const bias = selection_bias != nullptr ? selection_bias[e] : 0.0f;
    float const value =
        has_own_p(desc.router.kind) ? own_p(desc.router.kind, logits[e]) : logits[e];
    scratch.values[e] = value + bias;
    scratch.keys[e] = selection_key(scratch.values[e], e);
  }
  if (desc.router.kind == RouterKind::group_limited) {
    mask_groups(desc, scratch.values, scratch.keys, scratch.group_keys);
  }
  std::partial_sort(scratch.keys, scratch.keys + desc.shape.top_k, scratch.keys + experts);
}

std::int64_t chosen_expert(Scratch const& scratch, std::int64_t k) noexcept {
  return static_cast<std::int64_t>(static_cast<std::uint32_t>(scratch.keys[k]));
}

/// Scores of the chosen experts; chosen_p gets their p where the router has one of its own.
void score(MoeDesc const& desc, float const* logits, Scratch const& scratch, float* scores,
           float* chosen_p) noexcept {
  std::int64_t const k_max = desc.shape.top_k;
  float const scale = desc.router.route_scale;
  RouterKind const kind = desc.router.kind;
  if (kind == RouterKind::softmax_topk) {
    float const sum = softmax_terms(logits, desc.shape.experts, scratch.values);
    for (std::int64_t k = 0; k < k_max; ++k) {
      scores[k] = scale * (scratch.values[chosen_expert(scratch, k)] / sum);
    }
    return;
  }
  for (std::int64_t k = 0; k < k_max; ++k) {
    float const logit = logits[chosen_expert(scratch, k)];
    scores[k] = has_own_p(kind) ? own_p(kind, logit) : logit;
  }
  float sum = 1.0f;
  if (has_own_p(kind)) {
    if (chosen_p != nullptr) std::copy_n(scores, k_max, chosen_p);
    if (desc.router.normalize_scores) sum = core::warp_sum(scores, k_max) + kNormalizeFloor;
  } else {
    sum = softmax_terms(scores, k_max, scores);
  }
  for (std::int64_t k = 0; k < k_max; ++k) scores[k] = scale * (scores[k] / sum);
}

}  // namespace

std::int64_t select_scratch_floats(MoeDesc const& desc) noexcept { return 5 * desc.shape.experts; }

void router_logits(MoeDesc const& desc, ConstRows x, RouterWeights const& router,
                   MutableRows logits, Threads const& threads) noexcept {
  std::int64_t const d = desc.shape.hidden, experts = desc.shape.experts,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kRouterTokens,
                       count = std::min(kRouterTokens, tokens - first);
    ConstMatrix const w_router{router.w_router.data, router.w_router.pitch, 1};
    gemm(count, experts, d, {x[first], x.pitch, 1}, w_router.transposed(), 0.0f,
         {logits[first], logits.pitch, 1});
    if (router.b_router == nullptr) return;
    for (std::int64_t t = first; t < first + count; ++t) {
      for (std::int64_t e = 0; e < experts; ++e) logits[t][e] += router.b_router[e];
    }
  });
}

void select_experts(MoeDesc const& desc, ConstRows logits, float const* selection_bias,
                    Selection const& out, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, k_max = desc.shape.top_k,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    auto* const keys = reinterpret_cast<std::uint64_t*>(threads.scratch(slot));
    Scratch const scratch{keys, keys + experts, reinterpret_cast<float*>(keys + 2 * experts)};
    std::int64_t const end = std::min(tokens, (block + 1) * kRouterTokens);
    for (std::int64_t t = block * kRouterTokens; t < end; ++t) {
      choose(desc, logits[t], selection_bias, scratch);
      for (std::int64_t k = 0; k < k_max; ++k) store_id(out, t, k, chosen_expert(scratch, k));
      score(desc, logits[t], scratch, out.weights[t],
            out.chosen_p != nullptr ? out.chosen_p + t * k_max : nullptr);
    }
  });
}

}  // namespace tessera::cpu
