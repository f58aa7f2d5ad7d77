// SPDX-License-Identifier: Apache-2.0
#include "ops/plan.hpp"

#include <algorithm>

#include "core/router_math.hpp"
#include "cpu/parallel/low_precision.hpp"
#include "cpu/parallel/ops.hpp"
#include "ops/support.hpp"

namespace tessera::ops {
namespace {

bool has_router(MoeDesc const& desc) noexcept { return desc.router.kind != RouterKind::given; }

/// True where experts take tokens after, or instead of, a top-k choice.
bool experts_take(MoeDesc const& desc) noexcept {
  return desc.rounds_tokens() || desc.experts_choose();
}

void plan_router(MoeDesc const& desc, core::WorkspacePlan& plan, ForwardPlan& out) noexcept {
  std::int64_t const pairs = desc.shape.tokens * desc.shape.experts;
  if (has_router(desc) && !core::saves_logits(desc)) out.route.logits = plan.add<float>(pairs);
  if (!experts_take(desc)) return;
  out.route.ranks = plan.add<std::uint32_t>(pairs);
  out.route.pairs = plan.add<core::ExpertPairs>(desc.shape.experts);
}

std::int64_t router_scratch(MoeDesc const& desc) noexcept {
  if (!has_router(desc)) return 0;
  std::int64_t const choice = experts_take(desc) ? cpu::choose_tokens_scratch(desc) : 0;
  return std::max({choice, cpu::router_logits_scratch(desc), cpu::select_scratch_floats(desc)});
}

/// Whole cache lines, so that threads do not share one and every scratch is aligned for 8-byte types.
std::int64_t whole_lines(std::int64_t floats) noexcept { return (floats + 15) / 16 * 16; }

}  // namespace

ForwardPlan plan_forward(Context const& context, MoeDesc const& desc) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots();
  core::WorkspacePlan plan;
  ForwardPlan out;
  plan_router(desc, plan, out);
  out.route.chunk_counts = plan.add<std::int32_t>(cpu::metadata_chunks(slots) * s.experts);
  if (desc.save == SavePolicy::none) {
    out.routing = plan.add<std::byte>(static_cast<std::int64_t>(routing_table_bytes(desc)));
  }
  std::size_t const element = dtype_bytes(desc.dtype);
  bool const quantises = desc.quantises();
  if (!quantises) out.a = plan.add_storage(slots * s.intermediate, element);
  out.y = plan.add_storage(slots * cpu::column_chunk(desc), element);
  std::int64_t const experts = quantises ? cpu::quantised_scratch(desc)
                                         : std::max(cpu::up_projection_fwd_scratch(desc),
                                                    cpu::down_projection_fwd_scratch(desc));
  if (quantises) out.expert = plan.add<float>(cpu::quantised_expert_floats(desc));
  out.floats_per_thread = whole_lines(std::max(experts, router_scratch(desc)));
  out.scratch = plan.add<float>(out.floats_per_thread * context.num_threads());
  out.bytes = plan.bytes();
  return out;
}

ForwardPlan plan_route(Context const& context, MoeDesc const& desc) noexcept {
  core::WorkspacePlan plan;
  ForwardPlan out;
  plan_router(desc, plan, out);
  if (desc.experts_vary()) {
    out.routing = plan.add<std::byte>(static_cast<std::int64_t>(routing_table_bytes(desc)));
  } else if (core::saves_logits(desc)) {  // no tables hold them
    out.route.logits = plan.add<float>(desc.shape.tokens * desc.shape.experts);
  }
  out.floats_per_thread = whole_lines(router_scratch(desc));
  out.scratch = plan.add<float>(out.floats_per_thread * context.num_threads());
  out.bytes = plan.bytes();
  return out;
}

BackwardPlan plan_backward(Context const& context, MoeDesc const& desc, Pass pass) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots();
  core::WorkspacePlan plan;
  BackwardPlan out;
  bool const recompute = desc.save == SavePolicy::x && pass != Pass::backward_weights;
  std::size_t const element = dtype_bytes(desc.dtype);
  std::int64_t const h_elements = slots * desc.up_width() * s.intermediate;
  bool const quantises = desc.quantises();  // then dh does not fit in h
  if (pass == Pass::backward && (quantises || !desc.overwrite_h)) {
    out.dh = plan.add_storage(h_elements, element);
  }
  // A split backward has a_scaled in the caller's buffer.
  std::int64_t const a = pass == Pass::backward ? s.intermediate : 0;
  std::int64_t const rows =
      pass == Pass::backward_weights ? 0 : slots * std::max(a, cpu::column_chunk(desc));
  std::int64_t const x = quantises && pass != Pass::backward_input ? s.tokens * s.hidden : 0;
  out.a_or_dx = plan.add_storage(std::max(rows, x), element);
  if (pass != Pass::backward_weights) {
    if (has_router(desc)) out.dscores = plan.add<float>(slots);
    if (quantises) out.expert = plan.add<float>(cpu::quantised_expert_floats(desc));
  }
  if (has_router(desc) && pass == Pass::backward) {
    out.dlogits = plan.add<float>(s.tokens * s.experts);
  }
  if (pass != Pass::backward_weights) {
    std::int64_t const router = has_router(desc) ? std::max(cpu::router_dlogits_scratch(desc),
                                                            cpu::router_dgrad_scratch(desc))
                                                 : 0;
    std::int64_t const experts = quantises ? cpu::quantised_scratch(desc)
                                           : std::max(cpu::down_projection_dgrad_scratch(desc),
                                                      cpu::up_projection_dgrad_scratch(desc));
    out.floats_per_thread = std::max(experts, router);
  }
  if (pass != Pass::backward_input) {
    out.floats_per_thread = std::max({out.floats_per_thread, cpu::wgrad_scratch(desc),
                                      has_router(desc) ? cpu::router_wgrad_scratch(desc) : 0});
  }
  if (recompute && !quantises) {
    out.floats_per_thread = std::max(out.floats_per_thread, cpu::up_projection_fwd_scratch(desc));
  }
  out.floats_per_thread = whole_lines(out.floats_per_thread);
  out.scratch = plan.add<float>(out.floats_per_thread * context.num_threads());
  out.bytes = plan.bytes();
  return out;
}

}  // namespace tessera::ops
