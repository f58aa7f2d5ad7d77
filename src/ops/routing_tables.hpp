// SPDX-License-Identifier: Apache-2.0
// From what the caller gives (a router, ids and weights, or grouped rows) to the routing tables.
#pragma once

#include <cstddef>

#include "core/tensor_check.hpp"
#include "cpu/parallel/layer.hpp"
#include "ops/plan.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

/// Presence, shape and type of the tensors that route.
void visit_routing_inputs(MoeDesc const& desc, MoeForwardArgs const& args,
                          core::TensorVisitor& visitor) noexcept;

/// Values that must be sound before anything is written: offsets. Ids are always safe: those outside [0,E) are
/// sentinels. To be called after the tensors were checked.
Status check_routing_values(MoeDesc const& desc, MoeForwardArgs const& args) noexcept;

/// Fills the tables; `base` is the aligned workspace.
void make_routing_tables(MoeDesc const& desc, MoeForwardArgs const& args, ForwardPlan const& plan,
                         std::byte* base, RoutingView const& routing,
                         cpu::Threads const& threads) noexcept;

}  // namespace tessera::ops
