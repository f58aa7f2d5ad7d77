// SPDX-License-Identifier: Apache-2.0
// route: logits and selection alone
#include "core/tensor_check.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/plan.hpp"
#include "ops/router_args.hpp"
#include "ops/support.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace ops {

void check_router(MoeDesc const& desc, ConstTensor const& w_router, ConstTensor const& b_router,
                  ConstTensor const& selection_bias, core::TensorCheck& check) noexcept {
  MoeShape const& s = desc.shape;
  check.input("w_router", w_router, desc.dtype, {s.experts, s.hidden});
  check.optional_input("b_router", b_router, desc.dtype, {s.experts});
  check.optional_input("selection_bias", selection_bias, DType::fp32, {s.experts});
}

void run_router(MoeDesc const& desc, RouterInputs const& inputs, cpu::MutableRows logits,
                cpu::Selection const& out, cpu::Threads const& threads) noexcept {
  cpu::RouterWeights const weights{rows_of(inputs.w_router),
                                   static_cast<float const*>(inputs.b_router.data)};
  cpu::router_logits(desc, rows_of(inputs.x), weights, logits, threads);
  cpu::select_experts(desc, {logits.data, logits.pitch},
                      static_cast<float const*>(inputs.selection_bias.data), out, threads);
}

}  // namespace ops

Status route(Context const& context, MoeDesc const& desc, RouteArgs const& args,
             Stream stream) noexcept {
  TESSERA_TRY(ops::check_supported(context, desc));
  if (desc.router.kind == RouterKind::given) {
    return Status::invalid("router=given: there is nothing to route; set desc.router.kind");
  }
  MoeShape const& s = desc.shape;
  auto const workspace = workspace_bytes(context, desc, Pass::route);
  if (!workspace.ok()) return workspace.status();
  core::TensorCheck check{context.device()};
  check.input("x", args.x, desc.dtype, {s.tokens, s.hidden});
  ops::check_router(desc, args.w_router, args.b_router, args.selection_bias, check);
  check.output("topk_ids", args.topk_ids, desc.ids_dtype, {s.tokens, s.top_k});
  check.output("topk_weights", args.topk_weights, DType::fp32, {s.tokens, s.top_k});
  check.optional_output("logits", args.logits, DType::fp32, {s.tokens, s.experts});
  check.buffer("workspace", args.workspace, workspace.value(), 1, true);
  TESSERA_TRY(check.finish());
  if (context.cuda() != nullptr) return cuda::route(*context.cuda(), desc, args, stream);

  ops::ForwardPlan const plan = ops::plan_route(context, desc);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  cpu::Threads const threads{context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread};
  cpu::MutableRows const logits = args.logits.present()
                                      ? ops::rows_of(args.logits)
                                      : cpu::MutableRows{plan.route.logits.in(base), s.experts};
  std::int64_t const ids_pitch = s.tokens > 1 ? args.topk_ids.stride[0] : s.top_k;
  ops::run_router(
      desc, {args.x, args.w_router, args.b_router, args.selection_bias}, logits,
      {args.topk_ids.data, desc.ids_dtype, ids_pitch, ops::rows_of(args.topk_weights), nullptr},
      threads);
  return {};
}

}  // namespace tessera
