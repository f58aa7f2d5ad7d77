// SPDX-License-Identifier: Apache-2.0
// The router's part of a call: the same for a whole layer and for route().
#pragma once

#include "core/tensor_check.hpp"
#include "cpu/parallel/ops.hpp"
#include "ops/plan.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

struct RouterInputs {
  ConstTensor const& x;
  ConstTensor const& w_router;
  ConstTensor const& b_router;
  ConstTensor const& selection_bias;
  ConstTensor const& token_mask;
};

/// w_router and b_router, of MoeDesc::router_storage().
void visit_router_weights(MoeDesc const& desc, ConstTensor const& w_router,
                          ConstTensor const& b_router, core::TensorVisitor& visitor) noexcept;
void visit_router(MoeDesc const& desc, ConstTensor const& w_router, ConstTensor const& b_router,
                  ConstTensor const& selection_bias, core::TensorVisitor& visitor) noexcept;

/// Routers that choose take one.
void visit_token_mask(MoeDesc const& desc, ConstTensor const& token_mask,
                      core::TensorVisitor& visitor) noexcept;

/// Null without a mask: all tokens are real.
inline std::uint8_t const* mask_of(ConstTensor const& token_mask) noexcept {
  return static_cast<std::uint8_t const*>(token_mask.data);
}

/// Logits, then ids and weights of every token: the top-k choice.
void run_router(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                cpu::Selection const& out, cpu::Threads const& threads) noexcept;

/// Logits, then the slots of every token in the tables: topk_ids, scores, token_offsets where they vary, and what
/// backward needs besides. Replayed ids are in topk_ids beforehand.
void fill_slots(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                RoutePlan const& plan, std::byte* base, RoutingView const& routing,
                cpu::Threads const& threads) noexcept;

}  // namespace tessera::ops
