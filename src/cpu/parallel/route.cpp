// SPDX-License-Identifier: Apache-2.0
// l = x w_router^T + b_router; I_t = the K experts with the largest keys; scores by router_formula.hpp.
//
// Every exp, log and sum is one fixed fp32 sequence: for equal logits the scores are equal bit for bit on
// every device.
#include <algorithm>

#include "core/token_rounding.hpp"
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

/// Memory of one token's selection: 9E floats.
struct Scratch {
  std::uint64_t* keys;        ///< [E]
  std::uint64_t* group_keys;  ///< [E] at most
  float* values;              ///< [E] fp32 keys, then softmax terms
  float* scores;              ///< [K] of the chosen, c = 1
  float* all_scores;          ///< [E]
  std::int32_t* ids;          ///< [K]
  std::int32_t* eligible;     ///< [E] of the groups that the token keeps
};

Scratch scratch_of(MoeDesc const& desc, float* memory) noexcept {
  std::int64_t const experts = desc.shape.experts;
  auto* const keys = reinterpret_cast<std::uint64_t*>(memory);
  float* const floats = memory + 4 * experts;
  auto* const integers = reinterpret_cast<std::int32_t*>(floats + 3 * experts);
  return {keys,     keys + experts,    floats, floats + experts, floats + 2 * experts,
          integers, integers + experts};
}

/// The K largest keys: scratch.ids, in descending key.
void choose(MoeDesc const& desc, float const* logits, float const* selection_bias,
            Scratch const& scratch) noexcept {
  std::int64_t const experts = desc.shape.experts, k_max = desc.shape.top_k;
  std::uint64_t* const keys = scratch.keys;
  for (std::int64_t e = 0; e < experts; ++e) {
    float const bias = selection_bias != nullptr ? selection_bias[e] : 0.0f;
    float const value =
        has_own_p(desc.router.kind) ? own_p(desc.router.kind, logits[e]) : logits[e];
    scratch.values[e] = value + bias;
    keys[e] = selection_key(scratch.values[e], e);
  }
  if (desc.router.kind == RouterKind::group_limited) {
    mask_groups(desc, scratch.values, keys, scratch.group_keys);
  }
  for (std::int64_t e = 0; e < experts; ++e) scratch.eligible[e] = keys[e] != kMaskedKey ? 1 : 0;
  std::partial_sort(keys, keys + k_max, keys + experts);
  for (std::int64_t k = 0; k < k_max; ++k) {
    scratch.ids[k] = static_cast<std::int32_t>(static_cast<std::uint32_t>(keys[k]));
  }
}

/// Ranks of one token's pairs, E values `tokens` apart, by the score that each has or would have as an addition.
/// `sum` divides the members' p.
void rank_pairs(MoeDesc const& desc, float const* logits, Scratch const& scratch,
                std::int64_t members, float sum, std::uint32_t* ranks) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  float* const scores = scratch.all_scores;
  if (has_own_p(desc.router.kind)) {
    for (std::int64_t e = 0; e < experts; ++e) scores[e] = own_p(desc.router.kind, logits[e]) / sum;
  } else {
    float const all = softmax_terms(logits, experts, scores);
    for (std::int64_t e = 0; e < experts; ++e) scores[e] = scores[e] / all;
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    ranks[e * tokens] =
        members > 0 && scratch.eligible[e] == 0 ? 0 : core::pair_rank(false, scores[e]);
  }
  for (std::int64_t k = 0; k < members; ++k) {
    ranks[scratch.ids[k] * tokens] = core::pair_rank(true, scratch.scores[k]);
  }
}

/// A token that is padding.
void choose_nothing(MoeDesc const& desc, Selection const& out, std::int64_t token) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens,
                     k_max = desc.experts_choose() ? 0 : desc.shape.top_k;
  for (std::int64_t k = 0; k < k_max; ++k) store_id(out, token, k, -1);
  if (out.ranks != nullptr) {
    for (std::int64_t e = 0; e < experts; ++e) out.ranks[e * tokens + token] = 0;
    return;
  }
  std::fill_n(out.weights[token], k_max, 0.0f);
  if (out.chosen_p != nullptr) std::fill_n(out.chosen_p + token * k_max, k_max, 0.0f);
}

}  // namespace

std::int64_t select_scratch_floats(MoeDesc const& desc) noexcept { return 9 * desc.shape.experts; }

std::int64_t router_logits_scratch(MoeDesc const& desc) noexcept {
  return gemm_scratch_floats(kRouterTokens, desc.shape.experts, desc.shape.hidden);
}

template <class T, class W>
void router_logits(MoeDesc const& desc, Rows<T const> x, RouterWeights<W> const& router,
                   MutableRows logits, Threads const& threads) noexcept {
  std::int64_t const d = desc.shape.hidden, experts = desc.shape.experts,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    std::int64_t const first = block * kRouterTokens,
                       count = std::min(kRouterTokens, tokens - first);
    gemm(count, experts, d, left_operand(x.matrix().from(first, 0)),
         right_operand(router.w_router.matrix().transposed()),
         result(logits.matrix().from(first, 0)), threads.scratch(slot));
    if (router.b_router == nullptr) return;
    for (std::int64_t t = first; t < first + count; ++t) {
      for (std::int64_t e = 0; e < experts; ++e) logits[t][e] += to_fp32(router.b_router[e]);
    }
  });
}

template void router_logits(MoeDesc const&, Rows<float const>, RouterWeights<float> const&,
                            MutableRows, Threads const&) noexcept;
template void router_logits(MoeDesc const&, Rows<Bf16 const>, RouterWeights<Bf16> const&,
                            MutableRows, Threads const&) noexcept;
template void router_logits(MoeDesc const&, Rows<Bf16 const>, RouterWeights<float> const&,
                            MutableRows, Threads const&) noexcept;

void select_experts(MoeDesc const& desc, ConstRows logits, float const* selection_bias,
                    Selection const& out, Threads const& threads) noexcept {
  std::int64_t const k_max = desc.shape.top_k, tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    Scratch const scratch = scratch_of(desc, threads.scratch(slot));
    std::int64_t const end = std::min(tokens, (block + 1) * kRouterTokens);
    for (std::int64_t t = block * kRouterTokens; t < end; ++t) {
      if (out.token_mask != nullptr && out.token_mask[t] == 0) {
        choose_nothing(desc, out, t);
        continue;
      }
      if (desc.experts_choose()) {
        rank_pairs(desc, logits[t], scratch, 0, 1.0f, out.ranks + t);
        continue;
      }
      choose(desc, logits[t], selection_bias, scratch);
      for (std::int64_t k = 0; k < k_max; ++k) store_id(out, t, k, scratch.ids[k]);
      float const sum =
          unscaled_scores(desc, logits[t], scratch.ids, k_max, scratch.values, scratch.scores,
                          out.chosen_p != nullptr ? out.chosen_p + t * k_max : nullptr);
      if (out.ranks != nullptr) {
        rank_pairs(desc, logits[t], scratch, k_max, sum, out.ranks + t);
        continue;
      }
      for (std::int64_t k = 0; k < k_max; ++k) {
        out.weights[t][k] = desc.router.route_scale * scratch.scores[k];
      }
    }
  });
}

void score_choice(MoeDesc const& desc, ConstRows logits, RoutingView const& routing,
                  Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    Scratch const scratch = scratch_of(desc, threads.scratch(slot));
    std::int64_t const end = std::min(tokens, (block + 1) * kRouterTokens);
    for (std::int64_t t = block * kRouterTokens; t < end; ++t) {
      SlotRange const slots = slots_of(desc, routing, t);
      // The experts that the token names, each once: place[e] is where e stands among them.
      std::int32_t* const place = scratch.eligible;
      std::fill_n(place, experts, -1);
      std::int32_t count = 0;
      for (std::int64_t j = slots.first; j < slots.end; ++j) {
        std::int32_t const id = routing.topk_ids[j];
        if (id < 0 || place[id] >= 0) continue;
        place[id] = count;
        scratch.ids[count++] = id;
      }
      float* const p = scratch.all_scores;
      unscaled_scores(desc, logits[t], scratch.ids, count, scratch.values, scratch.scores, p);
      for (std::int64_t j = slots.first; j < slots.end; ++j) {
        std::int32_t const id = routing.topk_ids[j];
        routing.scores[j] = id < 0 ? 0.0f : desc.router.route_scale * scratch.scores[place[id]];
        if (routing.chosen_p != nullptr) routing.chosen_p[j] = id < 0 ? 0.0f : p[place[id]];
      }
    }
  });
}

}  // namespace tessera::cpu
