// SPDX-License-Identifier: Apache-2.0
// load balancing  L = sum_t sum_e C_e p~_te,  C_e = balance E f_e / (S sum f)
//   softmax       p~ = softmax(l),           dl_e = p~_e (C_e - sum C p~)
//   p of its own  p~ = p / (sum p + 1e-20),  dp_e = (C_e - sum C p~) / (sum p + 1e-20), dl_e = dp_e p'(l_e)
// of sequences    the same with costs C_be of the token's sequence b; one gradient of C_e + C_be
// z-loss          L = z/S sum_t lse_t^2,     dl_e = 2 z/S lse softmax(l)_e,  lse = largest + log(sum e^(l - largest))
#include "cpu/parallel/router_loss.hpp"

#include <algorithm>

#include "cpu/parallel/router_formula.hpp"

namespace tessera::cpu {
namespace {

/// One thread's memory, [E] each.
struct Scratch {
  float* softmax;
  float* p;  ///< p~
  float* own_p;
  float* products;
};

struct TokenLoss {
  float balance = 0, z = 0, sequence = 0;
};

/// p~ of one token into scratch.p; returns what p was divided by.
float load_shares(RouterKind kind, float const* logits, std::int64_t experts,
                  Scratch const& scratch) noexcept {
  if (!has_own_p(kind)) {
    std::copy_n(scratch.softmax, experts, scratch.p);
    return 1.0f;
  }
  for (std::int64_t e = 0; e < experts; ++e) scratch.own_p[e] = own_p(kind, logits[e]);
  float const sum = core::warp_sum(scratch.own_p, experts) + kNormalizeFloor;
  for (std::int64_t e = 0; e < experts; ++e) scratch.p[e] = scratch.own_p[e] / sum;
  return sum;
}

/// Losses of one token, and their gradient, unless dlogits is null. sequence_cost [E] may be null.
TokenLoss token_loss(MoeDesc const& desc, RouterLoss const& args, float const* logits,
                     float const* sequence_cost, Scratch const& scratch, float* dlogits) noexcept {
  std::int64_t const experts = desc.shape.experts;
  RouterKind const kind = desc.router.kind;
  float const sum = softmax_terms(logits, experts, scratch.softmax);
  float largest = logits[0];
  for (std::int64_t e = 1; e < experts; ++e) largest = largest > logits[e] ? largest : logits[e];
  for (std::int64_t e = 0; e < experts; ++e) scratch.softmax[e] /= sum;
  float const lse = largest + core::log_fp32(sum);

  float const divisor = load_shares(kind, logits, experts, scratch);
  for (std::int64_t e = 0; e < experts; ++e) scratch.products[e] = args.cost[e] * scratch.p[e];
  float const balance = core::warp_sum(scratch.products, experts);
  float sequence = 0.0f;
  if (sequence_cost != nullptr) {
    for (std::int64_t e = 0; e < experts; ++e)
      scratch.products[e] = sequence_cost[e] * scratch.p[e];
    sequence = core::warp_sum(scratch.products, experts);
  }
  float const mean = balance + sequence;
  TokenLoss const loss{balance, args.z * lse * lse, sequence};
  if (dlogits == nullptr) return loss;
  float const two_z = 2.0f * args.z;  // times lse it may overflow, where a softmax of 0 follows
  for (std::int64_t e = 0; e < experts; ++e) {
    float const cost = sequence_cost != nullptr ? args.cost[e] + sequence_cost[e] : args.cost[e];
    float const centered = cost - mean;
    float const of_balance = has_own_p(kind)
                                 ? own_p_gradient(kind, scratch.own_p[e], centered, divisor)
                                 : scratch.p[e] * centered;
    dlogits[e] = args.d_loss * (of_balance + two_z * scratch.softmax[e] * lse);
  }
  return loss;
}

}  // namespace

std::int64_t router_loss_blocks(std::int64_t tokens) noexcept {
  return (tokens + core::kLossTokens - 1) / core::kLossTokens;
}

std::int64_t router_loss_scratch(MoeDesc const& desc) noexcept { return 4 * desc.shape.experts; }

void router_loss(MoeDesc const& desc, RouterLoss const& args, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens,
                     blocks = router_loss_blocks(tokens);
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    float* const memory = threads.scratch(slot);
    Scratch const scratch{memory, memory + experts, memory + 2 * experts, memory + 3 * experts};
    std::int64_t const first = block * core::kLossTokens,
                       count = std::min<std::int64_t>(core::kLossTokens, tokens - first);
    float balance[core::kLossTokens], z[core::kLossTokens], sequence[core::kLossTokens];
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t const t = args.order != nullptr ? args.order[first + i] : first + i;
      float* const dlogits = args.dlogits.data != nullptr ? args.dlogits[t] : nullptr;
      TokenLoss own;
      if (first + i < args.real) {
        own = token_loss(desc, args, args.logits[t],
                         args.sequence_cost != nullptr
                             ? args.sequence_cost + args.sequence_of[t] * experts
                             : nullptr,
                         scratch, dlogits);
      } else if (dlogits != nullptr) {
        std::fill_n(dlogits, experts, 0.0f);
      }
      balance[i] = own.balance;
      z[i] = own.z;
      sequence[i] = own.sequence;
    }
    args.partial_losses[block] = core::warp_sum(balance, count);
    args.partial_losses[blocks + block] = core::warp_sum(z, count);
    args.partial_losses[2 * blocks + block] = core::warp_sum(sequence, count);
  });
}

}  // namespace tessera::cpu
