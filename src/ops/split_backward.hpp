// SPDX-License-Identifier: Apache-2.0
// The parts of a split backward pass, for callers that have another kernel clear the counters of its workspace.
#pragma once

#include "tessera/context.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

/// moe_backward_input() and moe_backward_weights(). counters_are_zero: those of the workspace will be on a GPU before
/// the first kernel, cuda::backward_counters(), so that no launch clears them.
Status backward_input(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                      Stream stream, bool counters_are_zero) noexcept;
Status backward_weights(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                        Stream stream, bool counters_are_zero) noexcept;

}  // namespace tessera::ops
