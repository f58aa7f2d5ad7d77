// SPDX-License-Identifier: Apache-2.0
// With g_k = c*ds_k, I the top-k choice (or the experts that replayed ids name) and F the experts of the token's slots;
// zero where not stated. Without token rounding F = I.
//   topk-softmax   dl_e = [e in I] q_e ([e in F] g_e - sum over I and F of g q)
//                         + p_e ([e added] g_e - sum over the added of g p)       added = F without I, p over all E
//   softmax-topk, expert-choice   dl_e = p_e ([e in F] g_e - sum over F of g p)
//   p of its own   dp_e = ([e in F] g_e - [e in I] sum over F of g q)/S with q = p/S where normalised, else g_e;
//                  dl_e = dp_e p'(l_e)
// dx = dl w_router,  dw_router = dl^T x,  db_router = sum over t of dl
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/router_formula.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {

/// Distinct experts of one token, and what the formulas read of each. A dropped member has dscores 0, which leaves it
/// in the softmax and out of the sums.
struct Experts {
  std::int64_t count = 0;
  std::int32_t* ids;
  float* scores;  ///< c*q or c*p
  float* p;       ///< routers with a p of their own
  float* dscores;

  void add(std::int32_t id, float score, float own, float dscore) noexcept {
    ids[count] = id;
    scores[count] = score;
    p[count] = own;
    dscores[count++] = dscore;
  }
};

/// One thread's memory: 10E floats.
struct Scratch {
  Experts members, added;
  std::int32_t* place;  ///< [E] of an expert among the members, or -1
  float* terms;         ///< [E]
};

Scratch scratch_of(float* memory, std::int64_t experts) noexcept {
  auto const take = [&memory, experts] {
    float* const taken = memory;
    memory += experts;
    return taken;
  };
  auto const integers = [&take] { return reinterpret_cast<std::int32_t*>(take()); };
  auto const list = [&] { return Experts{0, integers(), take(), take(), take()}; };
  Scratch out{list(), list(), integers(), take()};
  return out;
}

/// c * sum over the experts j of q_j (ds_k - ds_j), q = s/c: what g_k - sum of g q is where the q add up to 1, without
/// its cancellation.
float centered(Experts const& experts, std::int64_t k) noexcept {
  float sum = 0.0f;
  for (std::int64_t j = 0; j < experts.count; ++j) {
    sum += experts.scores[j] * (experts.dscores[k] - experts.dscores[j]);
  }
  return sum;
}

/// q or p of the k-th expert.
float unscaled(float scale, Experts const& experts, std::int64_t k) noexcept {
  return core::unscaled_score(scale, experts.scores[k]);
}

void topk_softmax(float scale, Experts const& members, float* dlogits) noexcept {
  for (std::int64_t k = 0; k < members.count; ++k) {
    dlogits[members.ids[k]] += unscaled(scale, members, k) * centered(members, k);
  }
}

// The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
void softmax_over_all(float scale, Experts const& chosen, float const* logits, std::int64_t experts,
                      float* dlogits) noexcept {
  if (chosen.count == 0) return;
  float const sum = softmax_terms(logits, experts, dlogits);
  float mean = 0.0f;
  for (std::int64_t k = 0; k < chosen.count; ++k) {
    mean += chosen.dscores[k] * chosen.scores[k];
    dlogits[chosen.ids[k]] = 0.0f;
  }
  float const rest = core::warp_sum(dlogits, experts) / sum;
  for (std::int64_t e = 0; e < experts; ++e) dlogits[e] = dlogits[e] / sum * -mean;
  for (std::int64_t k = 0; k < chosen.count; ++k) {
    float const g = scale * chosen.dscores[k];
    dlogits[chosen.ids[k]] = unscaled(scale, chosen, k) * (g * rest + centered(chosen, k));
  }
}

// The normalised q of the members add up to 1 - rest: g_k - sum of g q = g_k rest + centered.
void own_p_scores(Router const& router, Experts const& members, Experts const& added,
                  float* dlogits) noexcept {
  bool const normalized = router.normalize_scores;
  core::Normalizer normalizer;
  if (normalized) normalizer = core::normalizer(core::warp_sum(members.p, members.count));
  float of_added = 0.0f;
  for (std::int64_t k = 0; k < added.count; ++k) {
    of_added += added.scores[k] * added.dscores[k];
    float const g = router.route_scale * added.dscores[k];
    dlogits[added.ids[k]] = own_p_gradient(router.kind, added.p[k], g, normalizer.sum);
  }
  for (std::int64_t k = 0; k < members.count; ++k) {
    float g = router.route_scale * members.dscores[k];
    if (normalized) g = g * normalizer.rest + centered(members, k) - of_added;
    dlogits[members.ids[k]] = own_p_gradient(router.kind, members.p[k], g, normalizer.sum);
  }
}

/// Splits what token rounding left of the top-k choice from what it added.
void split_rounded(MoeDesc const& desc, RoutingView const& routing, float const* dscores,
                   std::int64_t token, Scratch& scratch) noexcept {
  std::int64_t const k_max = desc.shape.top_k;
  float const* const logits = routing.logits + token * desc.shape.experts;
  Experts& members = scratch.members;
  members.count = k_max;
  std::copy_n(routing.unrounded_ids + token * k_max, k_max, members.ids);
  unscaled_scores(desc, logits, members.ids, k_max, scratch.terms, members.scores, members.p);
  std::fill_n(scratch.place, desc.shape.experts, -1);
  for (std::int64_t k = 0; k < k_max; ++k) {
    scratch.place[members.ids[k]] = static_cast<std::int32_t>(k);
    members.scores[k] *= desc.router.route_scale;
    members.dscores[k] = 0.0f;
  }
  SlotRange const slots = slots_of(desc, routing, token);
  for (std::int64_t j = slots.first; j < slots.end; ++j) {
    std::int32_t const id = routing.topk_ids[j];
    if (scratch.place[id] >= 0) {
      members.dscores[scratch.place[id]] = dscores[j];
      continue;
    }
    float const p = has_own_p(desc.router.kind) ? own_p(desc.router.kind, logits[id]) : 0.0f;
    scratch.added.add(id, routing.scores[j], p, dscores[j]);
  }
}

/// The experts of the token's slots; those that replayed ids repeat count once, with the sum of their dscores.
void list_slots(MoeDesc const& desc, RoutingView const& routing, float const* dscores,
                std::int64_t token, Scratch& scratch) noexcept {
  bool const replay = desc.router.replay;
  if (replay) std::fill_n(scratch.place, desc.shape.experts, -1);
  SlotRange const slots = slots_of(desc, routing, token);
  for (std::int64_t j = slots.first; j < slots.end; ++j) {
    std::int32_t const id = routing.topk_ids[j];
    if (replay && id < 0) continue;
    if (replay && scratch.place[id] >= 0) {
      scratch.members.dscores[scratch.place[id]] += dscores[j];
      continue;
    }
    if (replay) scratch.place[id] = static_cast<std::int32_t>(scratch.members.count);
    float const p = routing.chosen_p != nullptr ? routing.chosen_p[j] : 0.0f;
    scratch.members.add(id, routing.scores[j], p, dscores[j]);
  }
}

}  // namespace

std::int64_t router_dlogits_scratch(MoeDesc const& desc) noexcept {
  return 10 * desc.shape.experts;
}

void router_dlogits(MoeDesc const& desc, RoutingView const& routing, RouterDlogitsArgs const& args,
                    Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  Router const& router = desc.router;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    Scratch const memory = scratch_of(threads.scratch(slot), experts);
    std::int64_t const end = std::min(tokens, (block + 1) * kRouterTokens);
    for (std::int64_t t = block * kRouterTokens; t < end; ++t) {
      Scratch scratch = memory;
      float* const dlogits = args.dlogits[t];
      float const* const logits =
          routing.logits != nullptr ? routing.logits + t * experts : nullptr;
      std::fill_n(dlogits, experts, 0.0f);
      if (args.token_mask != nullptr && args.token_mask[t] == 0) continue;
      // With a softmax over all, members and additions have one formula: F.
      bool const over_all = has_softmax_over_all(router.kind);
      if (desc.rounds_tokens() && !over_all) {
        split_rounded(desc, routing, args.dscores, t, scratch);
      } else {
        list_slots(desc, routing, args.dscores, t, scratch);
      }
      if (over_all) {
        softmax_over_all(router.route_scale, scratch.members, logits, experts, dlogits);
      } else if (has_own_p(router.kind)) {
        own_p_scores(router, scratch.members, scratch.added, dlogits);
      } else {
        softmax_over_all(router.route_scale, scratch.added, logits, experts, dlogits);
        topk_softmax(router.route_scale, scratch.members, dlogits);
      }
      if (args.initial.data == nullptr) continue;
      for (std::int64_t e = 0; e < experts; ++e) dlogits[e] += args.initial[t][e];
    }
  });
}

std::int64_t router_dgrad_scratch(MoeDesc const& desc) noexcept {
  return gemm_scratch_floats(kRouterTokens, desc.shape.hidden, desc.shape.experts);
}

template <class T, class W>
void router_dgrad(MoeDesc const& desc, ConstRows dlogits, Rows<W const> w_router, Rows<T> dx,
                  Threads const& threads) noexcept {
  std::int64_t const tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    std::int64_t const first = block * kRouterTokens,
                       count = std::min(kRouterTokens, tokens - first);
    gemm(count, desc.shape.hidden, desc.shape.experts,
         left_operand(dlogits.matrix().from(first, 0)), right_operand(w_router.matrix()),
         result(dx.matrix().from(first, 0)), threads.scratch(slot));
  });
}

template void router_dgrad(MoeDesc const&, ConstRows, Rows<float const>, Rows<float>,
                           Threads const&) noexcept;
template void router_dgrad(MoeDesc const&, ConstRows, Rows<Bf16 const>, Rows<Bf16>,
                           Threads const&) noexcept;
template void router_dgrad(MoeDesc const&, ConstRows, Rows<float const>, Rows<Bf16>,
                           Threads const&) noexcept;

namespace {

/// Copies of a block of rows without padding: dlogits [kReductionBlock,E], then x [kReductionBlock,kColumnBlock].
std::int64_t packed_floats(MoeDesc const& desc) noexcept {
  return kReductionBlock * (desc.shape.experts + kColumnBlock);
}

/// Adds the products of all real tokens, block by block; those of padding are no part of a block.
template <class T, class G>
void add_packed(RouterWgradArgs<T, G> const& args, std::int64_t tokens, std::int64_t experts,
                std::int64_t column, std::int64_t columns, float* memory,
                WgradSum<G>& sum) noexcept {
  auto* const x = reinterpret_cast<T*>(memory + kReductionBlock * experts);
  MutableRows const dlogits{memory, experts};
  Rows<T> const rows{x, kColumnBlock};
  std::int64_t count = 0;
  auto const add = [&] {
    sum.add(count, left_operand(ConstRows{memory, experts}.matrix().transposed()),
            right_operand(Rows<T const>{x, kColumnBlock}.matrix()));
    count = 0;
  };
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (args.token_mask[t] == 0) continue;
    std::copy_n(args.dlogits[t], experts, dlogits[count]);
    std::copy_n(args.x[t] + column, columns, rows[count]);
    if (++count == kReductionBlock) add();
  }
  if (count > 0) add();
}

}  // namespace

std::int64_t router_wgrad_scratch(MoeDesc const& desc) noexcept {
  return wgrad_sum_floats(desc.shape.experts, kColumnBlock) + packed_floats(desc);
}

template <class T, class G>
void router_wgrad(MoeDesc const& desc, RouterWgradArgs<T, G> const& args,
                  Threads const& threads) noexcept {
  std::int64_t const tokens = desc.shape.tokens, experts = desc.shape.experts,
                     d = desc.shape.hidden;
  auto const is_real = [&](std::int64_t t) {
    return args.token_mask == nullptr || args.token_mask[t] != 0;
  };
  std::int64_t real = 0;
  for (std::int64_t t = 0; t < tokens; ++t) real += is_real(t) ? 1 : 0;
  std::int64_t const blocks =
      args.dw_router.data == nullptr ? 0 : (d + kColumnBlock - 1) / kColumnBlock;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    std::int64_t const column = block * kColumnBlock, columns = std::min(kColumnBlock, d - column);
    WgradSum<G> sum(experts, columns, real, args.dw_router.matrix().from(0, column), args.mode,
                    threads.scratch(slot));
    if (args.token_mask != nullptr) {
      add_packed(args, tokens, experts, column, columns,
                 threads.scratch(slot) + wgrad_sum_floats(experts, kColumnBlock), sum);
      return sum.finish();
    }
    for (std::int64_t t = 0; t < tokens; t += kReductionBlock) {
      sum.add(std::min(kReductionBlock, tokens - t),
              left_operand(args.dlogits.matrix().from(t, 0).transposed()),
              right_operand(args.x.matrix().from(t, column)));
    }
    sum.finish();
  });
  if (args.db_router == nullptr) return;
  float* const sum = threads.scratch(0);  // [E] <= router_wgrad_scratch
  std::fill_n(sum, experts, 0.0f);
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (!is_real(t)) continue;
    for (std::int64_t e = 0; e < experts; ++e) sum[e] += args.dlogits[t][e];
  }
  store_bias_gradient(sum, experts, real > 0, args.mode, args.db_router);
}

template void router_wgrad(MoeDesc const&, RouterWgradArgs<float, float> const&,
                           Threads const&) noexcept;
template void router_wgrad(MoeDesc const&, RouterWgradArgs<Bf16, Bf16> const&,
                           Threads const&) noexcept;
template void router_wgrad(MoeDesc const&, RouterWgradArgs<Bf16, float> const&,
                           Threads const&) noexcept;

}  // namespace tessera::cpu
