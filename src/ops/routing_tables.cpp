// SPDX-License-Identifier: Apache-2.0
#include "ops/routing_tables.hpp"

#include <algorithm>

#include "core/desc_check.hpp"
#include "core/gathered_rows.hpp"
#include "core/unused_elements.hpp"
#include "cpu/parallel/ops.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/router_args.hpp"
#include "ops/support.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace ops {
namespace {

using Int = long long;  // for %lld

/// Element `i` of the memory of an int32 or int64 tensor.
std::int64_t integer_at(ConstTensor const& tensor, std::int64_t i) noexcept {
  return tensor.dtype == DType::int64 ? static_cast<std::int64_t const*>(tensor.data)[i]
                                      : static_cast<std::int32_t const*>(tensor.data)[i];
}

// Offsets on the CPU can be read, so bad ones are refused before anything is written.
Status check_token_offsets(MoeDesc const& desc, ConstTensor const& offsets) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t previous = 0;
  for (std::int64_t t = 0; t <= s.tokens; ++t) {
    std::int64_t const value = integer_at(offsets, t);
    std::int64_t const most = t == 0 ? 0 : s.slots;
    if (value < previous || value > most || (t == s.tokens && value != s.slots)) {
      return Status::invalid(
          "token_offsets[%lld]=%lld: they start at 0, never decrease and end at slots=%lld",
          static_cast<Int>(t), static_cast<Int>(value), static_cast<Int>(s.slots));
    }
    previous = value;
  }
  return {};
}

/// First row of `expert`, or past the last row for expert E, from offsets, ends or counts; `previous` is the
/// answer for the expert before.
std::int64_t group_offset(MoeDesc const& desc, ConstTensor const& groups, std::int64_t expert,
                          std::int64_t previous) noexcept {
  if (desc.grouping == RowGrouping::offsets) return integer_at(groups, expert);
  if (expert == 0) return 0;
  std::int64_t const value = integer_at(groups, expert - 1);
  if (desc.grouping == RowGrouping::ends) return value;
  return value < 0 ? -1 : previous + std::min(value, core::kMaxIndex);
}

/// Names what the caller gave as MoeForwardArgs::expert_offsets.
char const* groups_name(RowGrouping grouping) noexcept {
  switch (grouping) {
    case RowGrouping::ends:
      return "ends";
    case RowGrouping::counts:
      return "counts";
    default:
      return "expert_offsets";
  }
}

char const* groups_rule(RowGrouping grouping) noexcept {
  switch (grouping) {
    case RowGrouping::ends:
      return "ends never decrease, from 0 to at most the rows of x";
    case RowGrouping::counts:
      return "counts are not negative and add up to at most the rows of x";
    default:
      return "offsets start at 0, never decrease and end at most at the rows of x";
  }
}

Status check_groups(MoeDesc const& desc, ConstTensor const& groups) noexcept {
  std::int64_t previous = 0;
  std::int64_t const skipped = desc.grouping == RowGrouping::offsets ? 0 : 1;
  for (std::int64_t e = 0; e <= desc.shape.experts; ++e) {
    std::int64_t const offset = group_offset(desc, groups, e, previous);
    std::int64_t const most = e == 0 ? 0 : desc.shape.tokens;
    if (offset < previous || offset > most) {
      return Status::invalid("%s[%lld]=%lld, behind rows that end at %lld: %s=%lld",
                             groups_name(desc.grouping), static_cast<Int>(e - skipped),
                             static_cast<Int>(integer_at(groups, e - skipped)),
                             static_cast<Int>(previous), groups_rule(desc.grouping),
                             static_cast<Int>(desc.shape.tokens));
    }
    previous = offset;
  }
  return {};
}

void visit_given_ids(MoeDesc const& desc, MoeForwardArgs const& args,
                     core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  if (s.variable_experts) {
    visitor.input("topk_ids", args.topk_ids, desc.ids_dtype, {s.slots});
    visitor.input("token_offsets", args.token_offsets, desc.ids_dtype, {s.tokens + 1});
  } else {
    visitor.input("topk_ids", args.topk_ids, desc.ids_dtype, {s.tokens, s.top_k});
    visitor.absent("token_offsets", args.token_offsets, "the desc has no variable_experts");
  }
}

void visit_given_routing(MoeDesc const& desc, MoeForwardArgs const& args,
                         core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  visitor.absent("w_router", args.w_router, "router given takes ids and weights");
  visitor.absent("b_router", args.b_router, "router given takes ids and weights");
  visitor.absent("selection_bias", args.selection_bias, "router given takes ids and weights");
  visitor.absent("logits", args.logits, "router given has none");
  if (desc.grouping != RowGrouping::slots) {
    constexpr char const* kReason = "the rows are grouped already";
    visitor.absent("topk_ids", args.topk_ids, kReason);
    visitor.absent("topk_weights", args.topk_weights, kReason);
    visitor.absent("token_offsets", args.token_offsets, kReason);
    visitor.input(groups_name(desc.grouping), args.expert_offsets, desc.ids_dtype,
                  {s.experts + (desc.grouping == RowGrouping::offsets ? 1 : 0)});
    visitor.optional_input("row_scores", args.row_scores, DType::fp32, {s.tokens});
    return;
  }
  visitor.absent("expert_offsets", args.expert_offsets, "desc.grouping is slots");
  visitor.absent("row_scores", args.row_scores, "desc.grouping is slots");
  visit_given_ids(desc, args, visitor);
  if (s.variable_experts) {
    visitor.input("topk_weights", args.topk_weights, DType::fp32, {s.slots});
  } else {
    visitor.input("topk_weights", args.topk_weights, DType::fp32, {s.tokens, s.top_k});
  }
}

/// The tables of rows that the caller grouped.
void take_groups(MoeDesc const& desc, MoeForwardArgs const& args,
                 RoutingView const& routing) noexcept {
  std::int64_t previous = 0;
  for (std::int64_t e = 0; e <= desc.shape.experts; ++e) {
    previous = group_offset(desc, args.expert_offsets, e, previous);
    routing.expert_offsets[e] = static_cast<std::int32_t>(previous);
  }
  if (args.row_scores.present()) {
    std::copy_n(static_cast<float const*>(args.row_scores.data), desc.shape.tokens, routing.scores);
  } else {
    std::fill_n(routing.scores, desc.shape.tokens, 1.0f);
  }
  cpu::grouped_metadata(desc, routing);
}

void copy_token_offsets(MoeDesc const& desc, MoeForwardArgs const& args,
                        RoutingView const& routing) noexcept {
  for (std::int64_t t = 0; t <= desc.shape.tokens; ++t) {
    routing.token_offsets[t] = static_cast<std::int32_t>(integer_at(args.token_offsets, t));
  }
}

/// Copies what the caller gave into the routing tables: scores, and offsets where experts vary.
void copy_given_routing(MoeDesc const& desc, MoeForwardArgs const& args,
                        RoutingView const& routing) noexcept {
  MoeShape const& s = desc.shape;
  auto const* const weights = static_cast<float const*>(args.topk_weights.data);
  if (s.variable_experts) {
    std::copy_n(weights, s.slots, routing.scores);
    copy_token_offsets(desc, args, routing);
  } else {
    cpu::ConstRows const rows = rows_of(args.topk_weights);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      std::copy_n(rows[t], s.top_k, routing.scores + t * s.top_k);
    }
  }
}

/// Copies the ids to replay; every sentinel becomes -1.
void copy_replayed_ids(MoeDesc const& desc, MoeForwardArgs const& args,
                       RoutingView const& routing) noexcept {
  MoeShape const& s = desc.shape;
  auto const pitch = s.tokens > 1 && !s.variable_experts ? args.topk_ids.stride[0] : s.top_k;
  for (std::int64_t j = 0; j < desc.num_slots(); ++j) {
    std::int64_t const at = s.variable_experts ? j : j / s.top_k * pitch + j % s.top_k;
    std::int64_t const id = integer_at(args.topk_ids, at);
    routing.topk_ids[j] = id >= 0 && id < s.experts ? static_cast<std::int32_t>(id) : -1;
  }
  if (s.variable_experts) copy_token_offsets(desc, args, routing);
}

cpu::SlotIds given_ids(MoeDesc const& desc, MoeForwardArgs const& args) noexcept {
  std::int64_t const pitch = desc.shape.variable_experts ? 0
                             : desc.shape.tokens > 1     ? args.topk_ids.stride[0]
                                                         : desc.shape.top_k;
  return {args.topk_ids.data, desc.ids_dtype, pitch};
}

}  // namespace

void visit_routing_inputs(MoeDesc const& desc, MoeForwardArgs const& args,
                          core::TensorVisitor& visitor) noexcept {
  visit_token_mask(desc, args.token_mask, visitor);
  if (desc.router.kind == RouterKind::given) return visit_given_routing(desc, args, visitor);
  MoeShape const& s = desc.shape;
  constexpr char const* kReason = "the layer has a router";
  visitor.absent("expert_offsets", args.expert_offsets, kReason);
  visitor.absent("row_scores", args.row_scores, kReason);
  visitor.absent("topk_weights", args.topk_weights, kReason);
  if (desc.router.replay) {
    visit_given_ids(desc, args, visitor);
  } else {
    visitor.absent("topk_ids", args.topk_ids, kReason);
    visitor.absent("token_offsets", args.token_offsets, kReason);
  }
  visit_router(desc, args.w_router, args.b_router, args.selection_bias, visitor);
  visitor.optional_output("logits", args.logits, DType::fp32, {s.tokens, s.experts});
}

Status check_routing_values(MoeDesc const& desc, MoeForwardArgs const& args) noexcept {
  if (desc.grouping != RowGrouping::slots) return check_groups(desc, args.expert_offsets);
  return desc.shape.variable_experts ? check_token_offsets(desc, args.token_offsets) : Status();
}

void make_routing_tables(MoeDesc const& desc, MoeForwardArgs const& args, ForwardPlan const& plan,
                         std::byte* base, RoutingView const& routing,
                         cpu::Threads const& threads) noexcept {
  MoeShape const& s = desc.shape;
  if (desc.grouping != RowGrouping::slots) return take_groups(desc, args, routing);
  cpu::SlotIds ids;
  if (desc.router.kind == RouterKind::given) {
    copy_given_routing(desc, args, routing);
    ids = given_ids(desc, args);
  } else {
    // Logits that backward needs stay in the tables; others go where the caller wants them, or nowhere.
    cpu::MutableRows const logits =
        routing.logits != nullptr ? cpu::MutableRows{routing.logits, s.experts}
        : args.logits.present()   ? rows_of(args.logits)
                                  : cpu::MutableRows{plan.route.logits.in(base), s.experts};
    std::ranges::fill(core::unused_elements(desc, routing), 0);
    if (desc.router.replay) copy_replayed_ids(desc, args, routing);
    fill_slots(desc, {args.x, args.w_router, args.b_router, args.selection_bias, args.token_mask},
               logits, plan.route, base, routing, threads);
    if (routing.logits != nullptr && args.logits.present()) {
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        std::copy_n(logits[t], s.experts, rows_of(args.logits)[t]);
      }
    }
    ids = {routing.topk_ids, DType::int32, s.top_k};
  }
  cpu::metadata(desc, ids, routing, plan.route.chunk_counts.in(base), threads);
}

}  // namespace ops

Status routing_of_groups(Context const& context, MoeDesc const& desc,
                         GroupedRoutingArgs const& args, Stream stream) noexcept {
  TESSERA_TRY(ops::check_supported(context, desc));
  TESSERA_TRY(core::refuse_gathered_rows(desc));
  if (desc.grouping == RowGrouping::slots) {
    return Status::invalid(
        "grouping=slots: rows that the caller sorted by expert; moe_forward "
        "makes the tables of others");
  }
  MoeForwardArgs rows;
  rows.expert_offsets = args.expert_offsets;
  rows.row_scores = args.row_scores;
  core::TensorCheck check{context.device()};
  ops::visit_routing_inputs(desc, rows, check);
  check.buffer("routing", args.routing, ops::routing_table_bytes(desc), 4, true);
  TESSERA_TRY(check.finish());
  RoutingView const tables = ops::view_routing(desc, args.routing.data);
  if (context.cuda() != nullptr) {
    return cuda::routing_of_groups(*context.cuda(), desc, args, tables, stream);
  }
  TESSERA_TRY(ops::check_routing_values(desc, rows));
  ops::take_groups(desc, rows, tables);
  return {};
}

}  // namespace tessera
