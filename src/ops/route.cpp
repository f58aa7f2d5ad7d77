// SPDX-License-Identifier: Apache-2.0
// route: logits and selection alone
#include <algorithm>

#include "core/dtype_name.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/plan.hpp"
#include "ops/router_args.hpp"
#include "ops/support.hpp"
#include "ops/tensors.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace ops {

void visit_router_weights(MoeDesc const& desc, ConstTensor const& w_router,
                          ConstTensor const& b_router, core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  DType const storage = desc.router_storage();
  for (ConstTensor const* const tensor : {&w_router, &b_router}) {
    if (!tensor->present() || tensor->dtype == storage) continue;
    bool const served = tensor->dtype == DType::fp32 || tensor->dtype == desc.dtype;
    char const* const name = tensor == &w_router ? "w_router" : "b_router";
    char const* const own = core::dtype_name(tensor->dtype);
    if (served) {
      visitor.fail(
          Status::invalid("%s: dtype %s, but router_dtype says %s; set it to %s, or convert "
                          "the tensor",
                          name, own, core::dtype_name(storage), own));
    } else {
      visitor.fail(
          Status::invalid("%s: dtype %s beside x in %s; a router is fp32 or of the type of "
                          "x: convert it",
                          name, own, core::dtype_name(desc.dtype)));
    }
  }
  visitor.input("w_router", w_router, storage, {s.experts, s.hidden});
  visitor.optional_input("b_router", b_router, storage, {s.experts});
}

void visit_router(MoeDesc const& desc, ConstTensor const& w_router, ConstTensor const& b_router,
                  ConstTensor const& selection_bias, core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  visit_router_weights(desc, w_router, b_router, visitor);
  if (desc.experts_choose() || desc.router.replay) {
    visitor.absent("selection_bias", selection_bias, "no key of experts is compared");
  } else {
    visitor.optional_input("selection_bias", selection_bias, DType::fp32, {s.experts});
  }
}

void visit_token_mask(MoeDesc const& desc, ConstTensor const& token_mask,
                      core::TensorVisitor& visitor) noexcept {
  if (desc.router.kind == RouterKind::given || desc.router.replay) {
    visitor.absent("token_mask", token_mask,
                   desc.grouping == RowGrouping::slots
                       ? "padding among given ids is an id outside [0,experts)"
                       : "rows behind the last group are padding");
  } else {
    visitor.optional_input("token_mask", token_mask, DType::uint8, {desc.shape.tokens});
  }
}

namespace {

void run_logits(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                cpu::Threads const& threads) noexcept {
  with_router_storage(desc, [&]<class T, class W>(T, W) {
    cpu::RouterWeights<W> const weights{rows_of<W>(inputs.w_router),
                                        static_cast<W const*>(inputs.b_router.data)};
    cpu::router_logits(desc, rows_of<T>(inputs.x), weights, logits, threads);
  });
}

}  // namespace

void run_router(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                cpu::Selection const& out, cpu::Threads const& threads) noexcept {
  run_logits(desc, inputs, logits, threads);
  cpu::select_experts(desc, {logits.data, logits.pitch},
                      static_cast<float const*>(inputs.selection_bias.data), out, threads);
}

void fill_slots(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                RoutePlan const& plan, std::byte* base, RoutingView const& routing,
                cpu::Threads const& threads) noexcept {
  std::int64_t const top_k = desc.shape.top_k;
  if (desc.router.replay) {
    run_logits(desc, inputs, logits, threads);
    cpu::score_choice(desc, {logits.data, logits.pitch}, routing, threads);
  } else if (desc.experts_vary()) {
    std::uint32_t* const ranks = plan.ranks.in(base);
    run_router(desc, inputs, logits,
               {.ids = routing.unrounded_ids,
                .ids_pitch = top_k,
                .ranks = ranks,
                .token_mask = mask_of(inputs.token_mask)},
               threads);
    cpu::choose_tokens(desc, ranks, plan.pairs.in(base), routing, threads);
  } else {
    run_router(desc, inputs, logits,
               {.ids = routing.topk_ids,
                .ids_pitch = top_k,
                .weights = {routing.scores, top_k},
                .chosen_p = routing.chosen_p,
                .token_mask = mask_of(inputs.token_mask)},
               threads);
  }
}

void visit_tensors(MoeDesc const& desc, RouteArgs const& args, std::size_t workspace,
                   core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  visitor.input("x", args.x, desc.dtype, {s.tokens, s.hidden});
  visit_router(desc, args.w_router, args.b_router, args.selection_bias, visitor);
  if (desc.experts_vary()) {
    visitor.output("topk_ids", args.topk_ids, desc.ids_dtype, {desc.num_slots()});
    visitor.output("topk_weights", args.topk_weights, DType::fp32, {desc.num_slots()});
    visitor.output("token_offsets", args.token_offsets, desc.ids_dtype, {s.tokens + 1});
  } else {
    visitor.output("topk_ids", args.topk_ids, desc.ids_dtype, {s.tokens, s.top_k});
    visitor.output("topk_weights", args.topk_weights, DType::fp32, {s.tokens, s.top_k});
    visitor.absent("token_offsets", args.token_offsets, "every token has top_k slots");
  }
  visitor.optional_output("logits", args.logits, DType::fp32, {s.tokens, s.experts});
  visit_token_mask(desc, args.token_mask, visitor);
  visitor.buffer("workspace", args.workspace, workspace, 1, true);
}

}  // namespace ops

namespace {

/// Slots of a varying number per token, from tables in the workspace to the caller's tensors.
void copy_slots(MoeDesc const& desc, RoutingView const& routing, RouteArgs const& args) noexcept {
  auto const copy = [&](std::int32_t const* from, std::int64_t count, Tensor const& to) {
    if (desc.ids_dtype == DType::int64) {
      std::copy_n(from, count, static_cast<std::int64_t*>(to.data));
    } else {
      std::copy_n(from, count, static_cast<std::int32_t*>(to.data));
    }
  };
  copy(routing.topk_ids, desc.num_slots(), args.topk_ids);
  copy(routing.token_offsets, desc.shape.tokens + 1, args.token_offsets);
  std::copy_n(routing.scores, desc.num_slots(), static_cast<float*>(args.topk_weights.data));
}

}  // namespace

Status route(Context const& context, MoeDesc const& given, RouteArgs const& args,
             Stream stream) noexcept {
  TESSERA_TRY(ops::check_supported(context, given));
  MoeDesc const desc = ops::resolved(context, given);
  if (desc.router.kind == RouterKind::given || desc.router.replay) {
    return Status::invalid(
        "router=%d, replay=%d: the ids are given, there is nothing to route; use a router",
        static_cast<int>(desc.router.kind), desc.router.replay ? 1 : 0);
  }
  MoeShape const& s = desc.shape;
  auto const workspace = workspace_bytes(context, desc, Pass::route);
  if (!workspace.ok()) return workspace.status();
  TESSERA_TRY(ops::check_tensors(context.device(), desc, args, workspace.value()));
  if (context.cuda() != nullptr) return cuda::route(*context.cuda(), desc, args, stream);

  ops::ForwardPlan const plan = ops::plan_route(context, desc);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  cpu::Threads const threads{context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread};
  ops::RouterInputs const inputs{args.x, args.w_router, args.b_router, args.selection_bias,
                                 args.token_mask};
  if (desc.experts_vary()) {
    RoutingView const routing = ops::view_routing(desc, plan.routing.in(base));
    cpu::MutableRows const logits = args.logits.present()
                                        ? ops::rows_of(args.logits)
                                        : cpu::MutableRows{routing.logits, s.experts};
    ops::fill_slots(desc, inputs, logits, plan.route, base, routing, threads);
    copy_slots(desc, routing, args);
    return {};
  }
  cpu::MutableRows const logits = args.logits.present()
                                      ? ops::rows_of(args.logits)
                                      : cpu::MutableRows{plan.route.logits.in(base), s.experts};
  std::int64_t const ids_pitch = s.tokens > 1 ? args.topk_ids.stride[0] : s.top_k;
  ops::run_router(desc, inputs, logits,
                  {.ids = args.topk_ids.data,
                   .ids_dtype = desc.ids_dtype,
                   .ids_pitch = ids_pitch,
                   .weights = ops::rows_of(args.topk_weights),
                   .token_mask = ops::mask_of(args.token_mask)},
                  threads);
  return {};
}

}  // namespace tessera
