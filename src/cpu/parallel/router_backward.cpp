// SPDX-License-Identifier: Apache-2.0
// topk-softmax, over the chosen I_t with s = c*q and g_k = c*ds_k:  dl_k = q_k (g_k - sum over I_t of g q)
// dx = dl w_router,  dw_router = dl^T x,  db_router = sum over t of dl
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {
constexpr std::int64_t kTokenBlock = 256;
}

void router_dlogits(MoeDesc const& desc, RoutingView const& routing, float const* dscores,
                    MutableRows dlogits, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, k_max = desc.shape.top_k,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  float const scale = desc.router.route_scale;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    for (std::int64_t t = block * kTokenBlock; t < std::min(tokens, (block + 1) * kTokenBlock);
         ++t) {
      std::fill_n(dlogits[t], experts, 0.0f);
      float const* const scores = routing.scores + t * k_max;  // c*q
      float const* const ds = dscores + t * k_max;
      float mean = 0.0f;  // sum of g q = sum of ds * s
      for (std::int64_t k = 0; k < k_max; ++k) mean += ds[k] * scores[k];
      for (std::int64_t k = 0; k < k_max; ++k) {
        // q_k (c ds_k - sum g q) = s_k ds_k - q_k * mean, with q = s/c (c = 0: everything is 0)
        float const q = scale == 0.0f ? 0.0f : scores[k] / scale;
        dlogits[t][routing.topk_ids[t * k_max + k]] = q * (scale * ds[k] - mean);
      }
    }
  });
}

void router_dgrad(MoeDesc const& desc, ConstRows dlogits, ConstRows w_router, MutableRows dx,
                  Threads const& threads) noexcept {
  std::int64_t const tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kTokenBlock, count = std::min(kTokenBlock, tokens - first);
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
    for (std::int64_t t = 0; t < tokens; t += kTokenBlock) {
      std::int64_t const count = std::min(kTokenBlock, tokens - t);
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
