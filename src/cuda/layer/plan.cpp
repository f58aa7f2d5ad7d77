// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/plan.hpp"

#include <algorithm>

#include "core/gathered_rows.hpp"
#include "core/gradient_dtype.hpp"
#include "core/router_math.hpp"
#include "cuda/host/choose_tokens.hpp"
#include "cuda/host/experts_fwd.hpp"
#include "cuda/host/low_precision.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/host/route.hpp"
#include "cuda/host/router_backward.hpp"
#include "cuda/host/router_loss.hpp"
#include "cuda/host/split_fp32.hpp"
#include "cuda/layer/backend.hpp"
#include "tessera/low_precision.hpp"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kFp32Bytes = 4;

ChoicePlan plan_choice(MoeDesc const& desc, core::WorkspacePlan& plan) noexcept {
  ChoicePlan out;
  if (!chooses_tokens(desc)) return out;
  MoeShape const& s = desc.shape;
  if (desc.rounds_tokens()) out.member_scores = plan.add<float>(s.tokens * s.top_k);
  out.workspace = plan.add<std::byte>(
      static_cast<std::int64_t>(choose_tokens_workspace_bytes(s.tokens, s.experts)));
  return out;
}

/// Route may have ranked the slots. What it leaves stays: kernels of a pass may run again, each alone, and ranks are
/// places in shared memory.
std::int64_t metadata_bytes(MoeDesc const& desc) noexcept {
  std::int64_t const slots = desc.num_slots(), experts = desc.shape.experts;
  std::int64_t const unit_slots = kRankedTokens * desc.shape.top_k;
  std::size_t bytes = metadata_workspace_bytes(slots, experts);
  if (desc.router.kind != RouterKind::given && unit_slots <= kMetadataBlockSlots) {
    bytes = std::max(
        bytes, metadata_workspace_bytes(slots, experts, static_cast<std::int32_t>(unit_slots)));
  }
  return static_cast<std::int64_t>(bytes);
}

bool is_mxfp8(MoeDesc const& desc) noexcept { return desc.precision == Precision::mxfp8; }

/// Codes of `rows` rows of one behind the other. Scales of fp8 lie in columns where rows are sorted.
CodesRegion plan_codes(MoeDesc const& desc, std::int64_t rows, std::int64_t width, bool is_sorted,
                       core::WorkspacePlan& plan) noexcept {
  CodesRegion out;
  out.codes = plan.add<std::uint8_t>(rows * width);
  std::int64_t const scale_rows = is_sorted && !is_mxfp8(desc) ? padded_scale_rows(rows) : rows;
  std::int64_t const scales = scale_rows * (width / desc.scale_block());
  out.scales = plan.add<std::byte>(is_mxfp8(desc) ? scales : kFp32Bytes * scales);
  return out;
}

/// Codes of `rows` x `width` weights of every expert, or their scales alone where the call has codes.
CodesRegion plan_weight(MoeDesc const& desc, std::int64_t rows, std::int64_t width,
                        core::WorkspacePlan& plan) noexcept {
  std::int64_t const experts = desc.shape.experts;
  CodesRegion out;
  if (!desc.weight_codes) out.codes = plan.add<std::uint8_t>(experts * rows * width);
  out.scales = plan.add<std::byte>(
      experts * (is_mxfp8(desc) ? scale_atom_bytes(rows, width / desc.scale_block())
                                : kFp32Bytes * (rows / kScaleBlock) * (width / kScaleBlock)));
  return out;
}

core::Region<std::uint16_t> plan_terms(MoeDesc const& desc, core::WorkspacePlan& plan) noexcept {
  if (!core::has_fp32_router(desc)) return {};
  return plan.add<std::uint16_t>(desc.shape.experts * router_terms_pitch(desc.shape.hidden));
}

/// d_o8 and w_down_t, which down_projection_dgrad reads, and w_up_t, which up_projection_dgrad reads, in one place.
void plan_codes_of_dgrads(MoeDesc const& desc, core::WorkspacePlan& plan,
                          BackwardPlan& out) noexcept {
  MoeShape const& s = desc.shape;
  core::WorkspacePlan first, second;
  out.d_o8 = plan_codes(desc, s.tokens, s.hidden, false, first);
  out.w_down_t = plan_weight(desc, s.intermediate, s.hidden, first);
  out.w_up_t = plan_weight(desc, s.hidden, desc.up_width() * s.intermediate, second);
  std::size_t const place =
      plan.add<std::byte>(static_cast<std::int64_t>(std::max(first.bytes(), second.bytes())))
          .offset;
  for (CodesRegion* const region : {&out.d_o8, &out.w_down_t, &out.w_up_t}) {
    region->codes.offset += place;
    region->scales.offset += place;
  }
}

}  // namespace

std::int64_t column_chunk(MoeDesc const& desc) noexcept {
  constexpr std::int64_t kAligned = 8;  // bf16 in 16 bytes
  std::int64_t const d = desc.shape.hidden, chunk = desc.column_chunk;
  if (chunk == 0 || chunk >= d) return d;
  return chunk < kAligned ? chunk : chunk / kAligned * kAligned;
}

bool chooses_tokens(MoeDesc const& desc) noexcept {
  return !desc.router.replay && (desc.rounds_tokens() || desc.experts_choose());
}

bool has_few_tokens(MoeDesc const& desc) noexcept {
  constexpr std::int64_t kAligned = 8;  // bf16 in 16 bytes
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots(), tokens = std::max(s.tokens, core::dx_rows(desc));
  return slots > 0 && tokens <= kFewTokens && !desc.quantises() && column_chunk(desc) == s.hidden &&
         s.hidden % kAligned == 0 && s.intermediate % kAligned == 0 &&
         few_tokens_blocks(slots, s.experts) <= kFewTokensMostBlocks &&
         slots * (s.intermediate + s.hidden) <= kFewTokensMostValues;
}

ForwardPlan plan_forward(MoeDesc const& desc, std::size_t routing_bytes) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots();
  core::WorkspacePlan plan;
  ForwardPlan out;
  if (desc.save == SavePolicy::none) {
    out.routing = plan.add<std::byte>(static_cast<std::int64_t>(routing_bytes));
  }
  out.counters = plan.add<std::int32_t>(kNumTileCounters);
  out.cleared_words = kNumTileCounters;
  bool const quantises = desc.quantises(), few = has_few_tokens(desc);
  if (quantises) {
    out.a8 = plan_codes(desc, slots, s.intermediate, true, plan);
    if (!desc.weight_codes) out.w_down = plan_weight(desc, s.hidden, s.intermediate, plan);
  } else {
    out.a = plan.add<std::uint16_t>(slots * s.intermediate);
  }
  std::int64_t const y_values = slots * column_chunk(desc);
  if (few) {
    out.y = plan.add<std::uint16_t>(y_values);
    auto const before = static_cast<std::int64_t>(out.y.offset - out.counters.offset);
    out.cleared_words = (before + 2 * y_values) / 4;
  }
  bool const routed = desc.router.kind != RouterKind::given;
  if (routed && !chooses_tokens(desc)) out.metadata = plan.add<std::byte>(metadata_bytes(desc));
  // Regions that are used only to make the tables, or that up_projection_fwd is the last to read, are dead before y is
  // written, so they lie in its memory. With few tokens y is cleared while the tables are made.
  core::WorkspacePlan before_y = plan;
  if (routed && !core::saves_logits(desc)) {
    out.logits = before_y.add<float>(s.tokens * s.experts);
  }
  if (routed) out.router_terms = plan_terms(desc, before_y);
  if (!routed && desc.grouping == RowGrouping::slots) {
    out.ids = before_y.add<std::int32_t>(slots);
    out.metadata = before_y.add<std::byte>(metadata_bytes(desc));
  }
  out.choice = plan_choice(desc, before_y);
  if (quantises) {  // up_projection_fwd is their last reader
    if (desc.save == SavePolicy::none)
      out.x8 = plan_codes(desc, s.tokens, s.hidden, false, before_y);
    if (!desc.weight_codes) {
      out.w_up = plan_weight(desc, desc.up_width() * s.intermediate, s.hidden, before_y);
    }
  }
  if (!few) out.y = plan.add<std::uint16_t>(y_values);
  out.bytes = std::max(plan.bytes(), before_y.bytes());
  return out;
}

bool splits_rounded(MoeDesc const& desc) noexcept {
  return desc.rounds_tokens() && !core::has_softmax_over_all(desc.router.kind);
}

PackedPlan plan_packed(MoeDesc const& desc) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const columns = (core::has_fp32_router(desc) ? kWgradTerms : 1) * s.experts;
  core::WorkspacePlan plan;
  PackedPlan out;
  out.dlogits = plan.add<std::uint16_t>(s.tokens * columns);
  out.order = plan.add<std::int32_t>(s.tokens);
  out.rows = plan.add<std::int32_t>(2);
  out.chunk_offsets =
      plan.add<std::int32_t>(router_wgrad_most_chunks(s.tokens, s.hidden, columns) + 1);
  out.bytes = plan.bytes();
  return out;
}

std::span<std::int32_t> backward_counters(void* workspace) noexcept {
  static_assert(core::WorkspacePlan::kAlignment + sizeof(std::int32_t) * kNumTileCounters <=
                kBackwardCountersBytes);
  return {reinterpret_cast<std::int32_t*>(core::WorkspacePlan::align(workspace)), kNumTileCounters};
}

BackwardPlan plan_backward(MoeDesc const& desc, Pass pass) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots(), n = s.intermediate;
  std::int64_t const logits = s.tokens * s.experts;
  bool const routed = desc.router.kind != RouterKind::given;
  bool const whole = pass == Pass::backward;
  core::WorkspacePlan plan;
  BackwardPlan out;
  out.counters = plan.add<std::int32_t>(kNumTileCounters);  // first: backward_counters()
  bool const terms = core::has_fp32_router(desc);
  if (routed && !terms) out.rounded = plan.add<std::uint16_t>(logits);
  std::int64_t const packed = routed ? static_cast<std::int64_t>(plan_packed(desc).bytes) : 0;
  if (pass == Pass::backward_weights) out.packed = plan.add<std::byte>(packed);
  if (routed && pass != Pass::backward_input) {
    if (terms) out.wgrad_dlogits = plan.add<std::uint16_t>(kWgradTerms * logits);
    out.router_partials = plan.add<float>(
        router_wgrad_partials(s.tokens, s.hidden, (terms ? kWgradTerms : 1) * s.experts));
  }
  if (routed && terms && pass != Pass::backward_weights) {
    out.dgrad_dlogits = plan.add<std::uint16_t>(kDgradTerms * logits);
    out.dgrad_router = plan.add<std::uint16_t>(kDgradTerms * s.experts * s.hidden);
  }
  bool const quantises = desc.quantises();
  core::WorkspacePlan before_dgrad;
  if (quantises && pass != Pass::backward_input) {
    out.x = plan.add<std::uint16_t>(s.tokens * s.hidden);
  }
  if (pass != Pass::backward_weights) {
    if (whole && (quantises || !desc.overwrite_h)) {
      out.dh = plan.add<std::uint16_t>(slots * desc.up_width() * n);
    }
    std::int64_t const width = desc.up_width() * n;
    if (quantises) {
      if (!desc.overwrite_h) out.h8 = out.dh8 = plan_codes(desc, slots, width, true, plan);
      plan_codes_of_dgrads(desc, plan, out);
    }
    if (quantises && desc.save == SavePolicy::x && !desc.weight_codes) {
      before_dgrad = plan;
      out.w_up = plan_weight(desc, width, s.hidden, before_dgrad);
    }
    std::int64_t const rows = slots * std::max(whole ? n : 0, column_chunk(desc));
    out.a_or_dx = plan.add<std::uint16_t>(std::max(rows, whole ? (packed + 1) / 2 : 0));
    if (whole) out.packed = {out.a_or_dx.offset};
    out.ds_partials = plan.add<float>(slots * score_groups(n));
    if (routed) out.dscores = plan.add<float>(slots);
    if (routed) out.row_dlogits = plan.add<float>(slots);
    if (routed && whole) out.dlogits = plan.add<float>(logits);
    if (desc.router.replay) {
      out.merged_ids = plan.add<std::int32_t>(slots);
      out.merged_dscores = plan.add<float>(slots);
    }
    if (splits_rounded(desc)) {
      out.member_scores = plan.add<float>(s.tokens * s.top_k);
      out.member_dscores = plan.add<float>(s.tokens * s.top_k);
      out.added_ids = plan.add<std::int32_t>(slots);
      // The kernel that lists tokens has its scratch in shared memory.
      out.listed = {out.member_scores.offset};
      out.is_listed = {out.member_dscores.offset};
    }
  }
  out.bytes = std::max(plan.bytes(), before_dgrad.bytes());
  return out;
}

ScorePartials score_partials(MoeDesc const& desc, void* workspace) noexcept {
  BackwardPlan const plan = plan_backward(desc, Pass::backward_input);
  return {plan.ds_partials.in(core::WorkspacePlan::align(workspace)),
          static_cast<std::int32_t>(score_groups(desc.shape.intermediate))};
}

RoutePlan plan_route(MoeDesc const& desc) noexcept {
  MoeShape const& s = desc.shape;
  core::WorkspacePlan plan;
  RoutePlan out;
  out.logits = plan.add<float>(s.tokens * s.experts);
  out.router_terms = plan_terms(desc, plan);
  out.ids = plan.add<std::int32_t>(desc.num_slots());
  out.weights = plan.add<float>(desc.num_slots());
  if (desc.experts_vary()) out.token_offsets = plan.add<std::int32_t>(s.tokens + 1);
  if (desc.rounds_tokens()) out.unrounded_ids = plan.add<std::int32_t>(s.tokens * s.top_k);
  out.choice = plan_choice(desc, plan);
  out.bytes = plan.bytes();
  return out;
}

GroupedGemmPlan plan_grouped_gemm(std::int64_t experts) noexcept {
  core::WorkspacePlan plan;
  GroupedGemmPlan out;
  out.counters = plan.add<std::int32_t>(kNumTileCounters);
  out.expert_offsets = plan.add<std::int32_t>(experts + 1);
  out.bytes = plan.bytes();
  return out;
}

RouterLossPlan plan_router_loss(MoeDesc const& desc, std::int64_t sequences) noexcept {
  core::WorkspacePlan plan;
  RouterLossPlan out;
  out.cost = plan.add<float>(desc.shape.experts + 1);
  out.partials = plan.add<float>(kRouterLosses * loss_blocks(desc.shape.tokens));
  out.count = plan.add<std::int32_t>(1);
  out.order = plan.add<std::int32_t>(desc.shape.tokens);
  if (sequences > 0) {
    out.counts = plan.add<std::int32_t>(sequences * (desc.shape.experts + 1));
    out.sequence_of = plan.add<std::int32_t>(desc.shape.tokens);
    out.sequence_cost = plan.add<float>(sequences * desc.shape.experts);
  }
  out.bytes = plan.bytes();
  return out;
}

std::size_t workspace_bytes(MoeDesc const& desc, Pass pass, std::size_t routing_bytes) noexcept {
  switch (pass) {
    case Pass::forward:
      return plan_forward(desc, routing_bytes).bytes;
    case Pass::route:
      return plan_route(desc).bytes;
    default:
      return plan_backward(desc, pass).bytes;
  }
}

}  // namespace tessera::cuda
