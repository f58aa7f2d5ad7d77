// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/plan.hpp"

#include "core/router_math.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/layer/backend.hpp"

namespace tessera::cuda {

ForwardPlan plan_forward(MoeDesc const& desc, std::size_t routing_bytes) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots();
  core::WorkspacePlan plan;
  ForwardPlan out;
  if (desc.save == SavePolicy::none) {
    out.routing = plan.add<std::byte>(static_cast<std::int64_t>(routing_bytes));
  }
  out.counters = plan.add<std::int32_t>(kNumTileCounters);
  if (desc.router.kind != RouterKind::given && !core::saves_logits(desc)) {
    out.logits = plan.add<float>(s.tokens * s.experts);
  }
  if (desc.grouping == RowGrouping::slots) {
    if (desc.router.kind == RouterKind::given) out.ids = plan.add<std::int32_t>(slots);
    out.metadata =
        plan.add<std::byte>(static_cast<std::int64_t>(metadata_workspace_bytes(slots, s.experts)));
  }
  out.a = plan.add<std::uint16_t>(slots * s.intermediate);
  out.y = plan.add<std::uint16_t>(slots * s.hidden);
  out.bytes = plan.bytes();
  return out;
}

RoutePlan plan_route(MoeDesc const& desc) noexcept {
  MoeShape const& s = desc.shape;
  core::WorkspacePlan plan;
  RoutePlan out;
  out.counters = plan.add<std::int32_t>(kNumTileCounters);
  out.logits = plan.add<float>(s.tokens * s.experts);
  out.ids = plan.add<std::int32_t>(s.tokens * s.top_k);
  out.weights = plan.add<float>(s.tokens * s.top_k);
  out.bytes = plan.bytes();
  return out;
}

std::size_t workspace_bytes(MoeDesc const& desc, Pass pass, std::size_t routing_bytes) noexcept {
  return pass == Pass::route ? plan_route(desc).bytes : plan_forward(desc, routing_bytes).bytes;
}

}  // namespace tessera::cuda
