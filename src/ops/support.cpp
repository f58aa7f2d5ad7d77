// SPDX-License-Identifier: Apache-2.0
#include "ops/support.hpp"

#include "core/desc_check.hpp"
#include "core/router_math.hpp"
#include "core/tensor_check.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/plan.hpp"

namespace tessera::ops {
Status check_supported(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  if (desc.router.kind == RouterKind::expert_choice) {
    return Status::unsupported("router=expert-choice: this version serves all others");
  }
  if (desc.router.round != Rounding::none) {
    return Status::unsupported("round=%d: this version has no token rounding; use none",
                               static_cast<int>(desc.router.round));
  }
  if (desc.dtype != DType::fp32) {
    return Status::unsupported("dtype=%d: the CPU backend of this version stores fp32",
                               static_cast<int>(desc.dtype));
  }
  // s*a before w_down and s*y after it are the same sum: b_down is inside the score in both.
  if (desc.score_position == ScorePosition::input) {
    return Status::unsupported(
        "score_position=input: scores of x are not fused; scale x before the call");
  }
  return {};
}

Status check_supported(Context const& context, MoeDesc const& desc) noexcept {
  if (context.cuda() == nullptr) return check_supported(desc);
  TESSERA_TRY(core::check_desc(desc));
  return cuda::check_supported(desc);
}

std::size_t routing_table_bytes(MoeDesc const& desc) noexcept {
  auto const slots = static_cast<std::size_t>(desc.shape.num_slots());
  auto const experts = static_cast<std::size_t>(desc.shape.experts);
  std::size_t elements = experts + 1 + 4 * slots;
  if (desc.shape.variable_experts) elements += static_cast<std::size_t>(desc.shape.tokens) + 1;
  if (desc.router.kind != RouterKind::given) elements += slots;
  if (core::has_own_p(desc.router.kind)) elements += slots;
  if (desc.router.kind == RouterKind::softmax_topk) {
    elements += static_cast<std::size_t>(desc.shape.tokens) * experts;
  }
  return 4 * elements;
}

RoutingView view_routing(MoeDesc const& desc, void* routing) noexcept {
  std::int64_t const slots = desc.shape.num_slots();
  auto* next = static_cast<std::int32_t*>(routing);
  auto const take = [&next](std::int64_t count) {
    auto* const taken = next;
    next += count;
    return taken;
  };
  RoutingView view;
  view.expert_offsets = take(desc.shape.experts + 1);
  view.sort_permutation = take(slots);
  view.gather_index = take(slots);
  view.inverse_permutation = take(slots);
  view.scores = reinterpret_cast<float*>(take(slots));
  if (desc.shape.variable_experts) view.token_offsets = take(desc.shape.tokens + 1);
  if (desc.router.kind != RouterKind::given) view.topk_ids = take(slots);
  if (core::has_own_p(desc.router.kind)) view.chosen_p = reinterpret_cast<float*>(take(slots));
  if (desc.router.kind == RouterKind::softmax_topk) {
    view.logits = reinterpret_cast<float*>(take(desc.shape.tokens * desc.shape.experts));
  }
  return view;
}

}  // namespace tessera::ops

namespace tessera {

Expected<std::size_t> routing_bytes(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  return ops::routing_table_bytes(desc);
}

Expected<RoutingView> routing_view(MoeDesc const& desc, Buffer routing) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  core::TensorCheck check{{}};
  check.buffer("routing", routing, ops::routing_table_bytes(desc), 4, false);
  TESSERA_TRY(check.finish());
  return ops::view_routing(desc, routing.data);
}

Expected<SavedBytes> saved_bytes(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  std::size_t const element = dtype_bytes(desc.dtype);
  SavedBytes saved;
  if (desc.save == SavePolicy::none) return saved;
  saved.x = element * static_cast<std::size_t>(desc.shape.tokens * desc.shape.hidden);
  if (desc.save == SavePolicy::h) {
    saved.h = element * static_cast<std::size_t>(desc.shape.num_slots() * desc.up_width() *
                                                 desc.shape.intermediate);
  }
  saved.routing = ops::routing_table_bytes(desc);
  return saved;
}

Expected<std::size_t> workspace_bytes(Context const& context, MoeDesc const& desc,
                                      Pass pass) noexcept {
  TESSERA_TRY(core::check_pass(pass));
  TESSERA_TRY(ops::check_supported(context, desc));
  if (context.cuda() != nullptr) {
    TESSERA_TRY(cuda::check_supported(desc, pass));
    return cuda::workspace_bytes(desc, pass, ops::routing_table_bytes(desc));
  }
  switch (pass) {
    case Pass::forward:
      return ops::plan_forward(context, desc).bytes;
    case Pass::route:
      return ops::plan_route(context, desc).bytes;
    default:
      return ops::plan_backward(context, desc, pass).bytes;
  }
}

}  // namespace tessera
