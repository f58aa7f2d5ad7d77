// SPDX-License-Identifier: Apache-2.0
// moe_forward: (router) -> metadata -> up_projection_fwd -> down_projection_fwd -> aggregate
#include "core/gathered_rows.hpp"
#include "cpu/parallel/ops.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/low_precision.hpp"
#include "ops/plan.hpp"
#include "ops/quantised_rows.hpp"
#include "ops/routing_tables.hpp"
#include "ops/support.hpp"
#include "ops/tensors.hpp"
#include "ops/weights.hpp"

namespace tessera {

void ops::visit_tensors(MoeDesc const& desc, MoeForwardArgs const& args, std::size_t workspace,
                        core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  visitor.input("x", args.x, desc.dtype, {s.tokens, s.hidden});
  visit_routing_inputs(desc, args, visitor);
  visit_weights(desc, args.weights, visitor);
  visit_weight_codes(desc, args.weight_codes, true, false, visitor);
  visitor.output("o", args.o, desc.dtype, {s.tokens, s.hidden});
  visitor.optional_output("expert_counts", args.expert_counts, DType::int32, {s.experts});
  visitor.optional_output("topk_counts", args.topk_counts, DType::int32, {s.experts});
  if (desc.save == SavePolicy::h) {
    visitor.output("h", args.h, desc.quantises() ? DType::fp8_e4m3 : desc.dtype,
                   {desc.num_slots(), desc.up_width() * s.intermediate});
    visitor.contiguous("h", args.h);
  } else {
    visitor.absent("h", args.h, "the SavePolicy keeps no h");
  }
  visit_saved_scales(desc, args.x8, args.x_scale, args.h_scale, desc.save != SavePolicy::none,
                     desc.save == SavePolicy::h, visitor);
  if (desc.save != SavePolicy::none || args.routing.data != nullptr) {
    visitor.buffer("routing", args.routing, routing_table_bytes(desc), 4, true);
  }
  visitor.buffer("workspace", args.workspace, workspace, 1, true);
}

namespace {

Status forward_on_cuda(Context const& context, MoeDesc const& desc, MoeForwardArgs const& args,
                       Stream stream) noexcept {
  std::size_t const table_bytes = ops::routing_table_bytes(desc);
  TESSERA_TRY(ops::check_tensors(context.device(), desc, args,
                                 cuda::workspace_bytes(desc, Pass::forward, table_bytes)));
  void* const tables = args.routing.data != nullptr
                           ? args.routing.data
                           : core::WorkspacePlan::align(args.workspace.data);
  return cuda::moe_forward(*context.cuda(), desc, args, ops::view_routing(desc, tables),
                           table_bytes, stream);
}

/// M_e, and f_e as it was before rounding; `pairs` are those of token rounding.
void count_tokens(MoeDesc const& desc, RoutingView const& routing, core::ExpertPairs const* pairs,
                  MoeForwardArgs const& args) noexcept {
  auto* const rows = static_cast<std::int32_t*>(args.expert_counts.data);
  auto* const chosen = static_cast<std::int32_t*>(args.topk_counts.data);
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    std::int32_t const count = routing.expert_offsets[e + 1] - routing.expert_offsets[e];
    if (rows != nullptr) rows[e] = count;
    if (chosen == nullptr) continue;
    chosen[e] = desc.rounds_tokens() ? static_cast<std::int32_t>(pairs[e].members) : count;
  }
}

template <class T>
void forward_on_cpu(Context const& context, MoeDesc const& desc, MoeForwardArgs const& args,
                    ops::ForwardPlan const& plan) noexcept {
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  cpu::Threads const threads{context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread};
  void* const tables = args.routing.data != nullptr ? args.routing.data : plan.routing.in(base);
  RoutingView const routing = ops::view_routing(desc, tables);

  ops::make_routing_tables(desc, args, plan, base, routing, threads);
  count_tokens(desc, routing, plan.route.pairs.in(base), args);

  cpu::Layer<T> const layer{desc,
                            routing,
                            ops::up_matrices<T>(desc, args.weights),
                            ops::down_matrices<T>(desc, args.weights),
                            ops::up_biases<T>(desc, args.weights),
                            ops::down_biases<T>(args.weights),
                            args.weight_codes};
  T* const y = plan.y.in<T>(base);
  if constexpr (std::is_same_v<T, cpu::Bf16>) {
    if (desc.quantises()) {
      if (args.h_scale.present()) ops::clear(args.h_scale);
      cpu::quantised_forward(layer,
                             {.x = ops::rows_of<T>(args.x),
                              .x8 = ops::x8_rows(desc, args.x8.data, args.x_scale.data),
                              .h8 = ops::h8_rows(desc, args.h.data, args.h_scale.data),
                              .y = y,
                              .expert = plan.expert.in(base)},
                             threads);
      cpu::aggregate(layer,
                     cpu::AggregateArgs<T>{.rows = y,
                                           .columns = {0, layer.hidden()},
                                           .scores = routing.scores,
                                           .out = ops::rows_of<T>(args.o)},
                     threads);
      return;
    }
  }
  T* const a = plan.a.in<T>(base);
  cpu::up_projection_fwd(layer, ops::rows_of<T>(args.x), static_cast<T*>(args.h.data), a, threads);
  cpu::for_each_column_chunk(desc, [&](cpu::Columns columns) {
    cpu::down_projection_fwd(layer, static_cast<T const*>(a), columns, y, threads);
    cpu::aggregate(layer,
                   cpu::AggregateArgs<T>{.rows = y,
                                         .columns = columns,
                                         .scores = routing.scores,
                                         .out = ops::rows_of<T>(args.o)},
                   threads);
  });
}

}  // namespace

Status moe_forward(Context const& context, MoeDesc const& given, MoeForwardArgs const& args,
                   Stream stream) noexcept {
  TESSERA_TRY(ops::check_supported(context, given));
  TESSERA_TRY(core::refuse_gathered_rows(given));
  MoeDesc const desc = ops::resolved(context, given);
  if (context.cuda() != nullptr) return forward_on_cuda(context, desc, args, stream);
  ops::ForwardPlan const plan = ops::plan_forward(context, desc);
  TESSERA_TRY(ops::check_tensors(context.device(), desc, args, plan.bytes));
  TESSERA_TRY(ops::check_routing_values(desc, args));
  ops::with_storage(desc.dtype, [&]<class T>(T) { forward_on_cpu<T>(context, desc, args, plan); });
  return {};
}

}  // namespace tessera
