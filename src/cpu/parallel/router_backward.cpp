// SPDX-License-Identifier: Apache-2.0
// With g_k = c*ds_k; zero where not stated:
//   topk-softmax   dl_k = q_k (g_k - sum over the chosen of g q)
//   softmax-topk   dl_e = p_e (g_e [e chosen] - sum over the chosen of g p), all experts
//   p of its own   dp_k = (g_k - sum of g q)/S with q = p/S where normalised, else g_k; dl_k = dp_k p'(l_k)
// dx = dl w_router,  dw_router = dl^T x,  db_router = sum over t of dl
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/router_formula.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {

/// One token's slots.
struct Chosen {
  std::int64_t count;
  std::int32_t const* ids;
  float const* scores;  ///< c*q or c*p
  float const* p;       ///< routers with a p of their own
  float const* dscores;
};

/// c * sum over the chosen j of q_j (ds_k - ds_j), q = s/c: what g_k - sum of g q is where the q add up to 1, without
/// its cancellation.
float centered(Chosen const& chosen, std::int64_t k) noexcept {
  float sum = 0.0f;
  for (std::int64_t j = 0; j < chosen.count; ++j) {
    sum += chosen.scores[j] * (chosen.dscores[k] - chosen.dscores[j]);
  }
  return sum;
}

/// q or p of the k-th choice; c = 0 makes every score and gradient 0.
float unscaled(float scale, Chosen const& chosen, std::int64_t k) noexcept {
  return scale == 0.0f ? 0.0f : chosen.scores[k] / scale;
}

void topk_softmax(float scale, Chosen const& chosen, float* dlogits) noexcept {
  for (std::int64_t k = 0; k < chosen.count; ++k) {
    dlogits[chosen.ids[k]] = unscaled(scale, chosen, k) * centered(chosen, k);
  }
}

// The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
void softmax_topk(float scale, Chosen const& chosen, float const* logits, std::int64_t experts,
                  float* dlogits) noexcept {
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

void own_p_scores(Router const& router, Chosen const& chosen, float* dlogits) noexcept {
  float const sum =
      router.normalize_scores ? core::warp_sum(chosen.p, chosen.count) + kNormalizeFloor : 1.0f;
  for (std::int64_t k = 0; k < chosen.count; ++k) {
    float const g =
        router.normalize_scores ? centered(chosen, k) : router.route_scale * chosen.dscores[k];
    dlogits[chosen.ids[k]] = own_p_gradient(router.kind, chosen.p[k], g / sum);
  }
}

}  // namespace

void router_dlogits(MoeDesc const& desc, RoutingView const& routing, float const* dscores,
                    MutableRows dlogits, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, k_max = desc.shape.top_k,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  Router const& router = desc.router;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const end = std::min(tokens, (block + 1) * kRouterTokens);
    for (std::int64_t t = block * kRouterTokens; t < end; ++t) {
      std::int64_t const slot = t * k_max;
      Chosen const chosen{k_max, routing.topk_ids + slot, routing.scores + slot,
                          routing.chosen_p != nullptr ? routing.chosen_p + slot : nullptr,
                          dscores + slot};
      if (router.kind == RouterKind::softmax_topk) {
        softmax_topk(router.route_scale, chosen, routing.logits + t * experts, experts, dlogits[t]);
        continue;
      }
      std::fill_n(dlogits[t], experts, 0.0f);
      if (has_own_p(router.kind)) {
        own_p_scores(router, chosen, dlogits[t]);
      } else {
        topk_softmax(router.route_scale, chosen, dlogits[t]);
      }
    }
  });
}

void router_dgrad(MoeDesc const& desc, ConstRows dlogits, ConstRows w_router, MutableRows dx,
                  Threads const& threads) noexcept {
  std::int64_t const tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kRouterTokens,
                       count = std::min(kRouterTokens, tokens - first);
    gemm(count, desc.shape.hidden, desc.shape.experts, {dlogits[first], dlogits.pitch, 1},
         {w_router.data, w_router.pitch, 1}, 0.0f, {dx[first], dx.pitch, 1});
  });
}

std::int64_t router_wgrad_scratch(MoeDesc const& desc) noexcept {
  return desc.shape.experts * kColumnBlock;
}

void router_wgrad(MoeDesc const& desc, RouterWgradArgs const& args,
                  Threads const& threads) noexcept {
  std::int64_t const tokens = desc.shape.tokens, experts = desc.shape.experts,
                     d = desc.shape.hidden;
  std::int64_t const blocks =
      args.dw_router.data == nullptr ? 0 : (d + kColumnBlock - 1) / kColumnBlock;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    std::int64_t const column = block * kColumnBlock, columns = std::min(kColumnBlock, d - column);
    Matrix const destination{args.dw_router.data + column, args.dw_router.pitch, 1};
    WgradSum sum(experts, columns, destination, args.mode, threads.scratch(slot));
    for (std::int64_t t = 0; t < tokens; t += kRouterTokens) {
      std::int64_t const count = std::min(kRouterTokens, tokens - t);
      ConstMatrix const dlogits{args.dlogits[t], args.dlogits.pitch, 1};
      sum.add(count, dlogits.transposed(), {args.x[t] + column, args.x.pitch, 1});
    }
    sum.finish();
  });
  if (args.db_router == nullptr) return;
  float* const sum = threads.scratch(0);  // [E] <= router_wgrad_scratch
  std::fill_n(sum, experts, 0.0f);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < experts; ++e) sum[e] += args.dlogits[t][e];
  }
  store_bias_gradient(sum, experts, tokens > 0, args.mode, args.db_router);
}

}  // namespace tessera::cpu
