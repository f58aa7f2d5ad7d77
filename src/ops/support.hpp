// SPDX-License-Identifier: Apache-2.0
// The devices that this build serves, and the checks of all entry points before anything is written.
#pragma once

#include <cstddef>

#include "tessera/context.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

/// The desc is valid, and served: errors invalid_argument or unsupported.
Status check_supported(MoeDesc const& desc) noexcept;
/// The same, and the context's device serves it.
Status check_supported(Context const& context, MoeDesc const& desc) noexcept;
/// Refuses a context that is not on cuda, or on a GPU that joins no others, for calls of experts over several ranks.
Status check_on_gpu(Context const& context) noexcept;

/// The same layer with its router in one spelling, and what Precision::automatic takes on this device in its place,
/// without weight_codes where that is native. Of a checked desc.
MoeDesc resolved(Context const& context, MoeDesc desc) noexcept;
/// Ok where Precision::automatic takes fp8; else the error says why it takes native. Of a checked desc.
Status check_gains_by_fp8(Context const& context, MoeDesc const& desc) noexcept;

/// routing_bytes() of a desc that was checked.
std::size_t routing_table_bytes(MoeDesc const& desc) noexcept;
/// routing_view() of a desc and buffer that were checked.
RoutingView view_routing(MoeDesc const& desc, void* routing) noexcept;

}  // namespace tessera::ops
