// SPDX-License-Identifier: Apache-2.0
// The parts of a split backward pass, for callers whose own kernels do some of their work on a GPU.
#pragma once

#include "cuda/layer/backend.hpp"
#include "tessera/context.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

/// moe_backward_input() and moe_backward_weights().
Status backward_input(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                      Stream stream, cuda::SplitBackward split) noexcept;
Status backward_weights(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                        Stream stream, cuda::SplitBackward split) noexcept;

}  // namespace tessera::ops
