// SPDX-License-Identifier: Apache-2.0
// moe_forward: (router) -> metadata -> up_projection_fwd -> down_projection_fwd -> aggregate
#include <algorithm>

#include "core/tensor_check.hpp"
#include "cpu/parallel/ops.hpp"
#include "ops/plan.hpp"
#include "ops/router_args.hpp"
#include "ops/support.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

/// Offsets on the CPU can be read, so bad ones are refused before anything is written.
template <class T>
Status check_token_offsets(T const* offsets, std::int64_t tokens, std::int64_t slots) noexcept {
  for (std::int64_t t = 0; t <= tokens; ++t) {
    auto const value = static_cast<std::int64_t>(offsets[t]);
    auto const least = t == 0 ? std::int64_t{0} : static_cast<std::int64_t>(offsets[t - 1]);
    auto const most = t == 0 ? std::int64_t{0} : slots;
    if (value < least || value > most || (t == tokens && value != slots)) {
      return Status::invalid(
          "token_offsets[%lld]=%lld: they start at 0, never decrease and end at slots=%lld",
          static_cast<long long>(t), static_cast<long long>(value), static_cast<long long>(slots));
    }
  }
  return {};
}

Status check_given_routing(MoeDesc const& desc, MoeForwardArgs const& args,
                           core::TensorCheck& check) noexcept {
  MoeShape const& s = desc.shape;
  if (s.variable_experts) {
    check.input("topk_ids", args.topk_ids, desc.ids_dtype, {s.slots});
    check.input("topk_weights", args.topk_weights, DType::fp32, {s.slots});
    check.input("token_offsets", args.token_offsets, desc.ids_dtype, {s.tokens + 1});
  } else {
    check.input("topk_ids", args.topk_ids, desc.ids_dtype, {s.tokens, s.top_k});
    check.input("topk_weights", args.topk_weights, DType::fp32, {s.tokens, s.top_k});
    check.absent("token_offsets", args.token_offsets, "the desc has no variable_experts");
  }
  check.absent("w_router", args.w_router, "router given takes ids and weights");
  check.absent("b_router", args.b_router, "router given takes ids and weights");
  check.absent("selection_bias", args.selection_bias, "router given takes ids and weights");
  check.absent("logits", args.logits, "router given has none");
  return {};
}

Status check_forward(Context const& context, MoeDesc const& desc, MoeForwardArgs const& args,
                     std::size_t workspace) noexcept {
  MoeShape const& s = desc.shape;
  core::TensorCheck check{context.device()};
  check.input("x", args.x, desc.dtype, {s.tokens, s.hidden});
  if (desc.router.kind == RouterKind::given) {
    TESSERA_TRY(check_given_routing(desc, args, check));
  } else {
    check.absent("topk_ids", args.topk_ids, "the layer has a router");
    check.absent("topk_weights", args.topk_weights, "the layer has a router");
    check.absent("token_offsets", args.token_offsets, "the layer has a router");
    ops::check_router(desc, args.w_router, args.b_router, args.selection_bias, check);
    check.optional_output("logits", args.logits, DType::fp32, {s.tokens, s.experts});
  }
  check.absent("expert_offsets", args.expert_offsets, "only post-dispatch calls take it");
  check.absent("row_scores", args.row_scores, "only post-dispatch calls take it");
  ops::check_weights(desc, args.weights, check);
  check.output("o", args.o, desc.dtype, {s.tokens, s.hidden});
  check.optional_output("expert_counts", args.expert_counts, DType::int32, {s.experts});
  if (desc.save == SavePolicy::h) {
    check.output("h", args.h, desc.dtype, {s.num_slots(), desc.up_width() * s.intermediate});
    check.contiguous("h", args.h);
  } else {
    check.absent("h", args.h, "the SavePolicy keeps no h");
  }
  if (desc.save != SavePolicy::none || args.routing.data != nullptr) {
    check.buffer("routing", args.routing, ops::routing_table_bytes(desc), 4, true);
  }
  check.buffer("workspace", args.workspace, workspace, 1, true);
  TESSERA_TRY(check.finish());
  if (!s.variable_experts) return {};
  return desc.ids_dtype == DType::int64
             ? check_token_offsets(static_cast<std::int64_t const*>(args.token_offsets.data),
                                   s.tokens, s.slots)
             : check_token_offsets(static_cast<std::int32_t const*>(args.token_offsets.data),
                                   s.tokens, s.slots);
}

/// Copies what the caller gave into the routing tables: scores, and offsets where experts vary.
void copy_given_routing(MoeDesc const& desc, MoeForwardArgs const& args,
                        RoutingView const& routing) noexcept {
  MoeShape const& s = desc.shape;
  auto const* const weights = static_cast<float const*>(args.topk_weights.data);
  if (s.variable_experts) {
    std::copy_n(weights, s.slots, routing.scores);
    for (std::int64_t t = 0; t <= s.tokens; ++t) {
      routing.token_offsets[t] = desc.ids_dtype == DType::int64
                                     ? static_cast<std::int32_t>(static_cast<std::int64_t const*>(
                                           args.token_offsets.data)[t])
                                     : static_cast<std::int32_t const*>(args.token_offsets.data)[t];
    }
  } else {
    cpu::ConstRows const rows = ops::rows_of(args.topk_weights);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      std::copy_n(rows[t], s.top_k, routing.scores + t * s.top_k);
    }
  }
}

cpu::SlotIds given_ids(MoeDesc const& desc, MoeForwardArgs const& args) noexcept {
  std::int64_t const pitch = desc.shape.variable_experts ? 0
                             : desc.shape.tokens > 1     ? args.topk_ids.stride[0]
                                                         : desc.shape.top_k;
  return {args.topk_ids.data, desc.ids_dtype, pitch};
}

void forward_on_cpu(Context const& context, MoeDesc const& desc, MoeForwardArgs const& args,
                    ops::ForwardPlan const& plan) noexcept {
  MoeShape const& s = desc.shape;
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  cpu::Threads const threads{context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread};
  void* const tables = args.routing.data != nullptr ? args.routing.data : plan.routing.in(base);
  RoutingView const routing = ops::view_routing(desc, tables);

  cpu::SlotIds ids;
  if (desc.router.kind == RouterKind::given) {
    copy_given_routing(desc, args, routing);
    ids = given_ids(desc, args);
  } else {
    cpu::MutableRows const logits = args.logits.present()
                                        ? ops::rows_of(args.logits)
                                        : cpu::MutableRows{plan.route.logits.in(base), s.experts};
    ops::run_router(desc, {args.x, args.w_router, args.b_router, args.selection_bias}, logits,
                    {routing.topk_ids, DType::int32, s.top_k, {routing.scores, s.top_k}}, threads);
    ids = {routing.topk_ids, DType::int32, s.top_k};
  }
  cpu::metadata(desc, ids, routing, plan.route.chunk_counts.in(base), threads);
  if (args.expert_counts.present()) {
    auto* const counts = static_cast<std::int32_t*>(args.expert_counts.data);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      counts[e] = routing.expert_offsets[e + 1] - routing.expert_offsets[e];
    }
  }

  cpu::Layer const layer{desc,
                         routing,
                         ops::up_matrices(desc, args.weights),
                         ops::down_matrices(desc, args.weights),
                         ops::up_biases(desc, args.weights),
                         ops::down_biases(args.weights)};
  float* const a = plan.a.in(base);
  float* const y = plan.y.in(base);
  cpu::up_projection_fwd(layer, ops::rows_of(args.x), static_cast<float*>(args.h.data), a, threads);
  cpu::down_projection_fwd(layer, a, y, threads);
  cpu::aggregate(layer, {.rows = y, .scores = routing.scores, .out = ops::rows_of(args.o)},
                 threads);
}

}  // namespace

Status moe_forward(Context const& context, MoeDesc const& desc, MoeForwardArgs const& args,
                   Stream) noexcept {
  TESSERA_TRY(ops::check_supported(context, desc));
  ops::ForwardPlan const plan = ops::plan_forward(context, desc);
  TESSERA_TRY(check_forward(context, desc, args, plan.bytes));
  forward_on_cpu(context, desc, args, plan);
  return {};
}

}  // namespace tessera
