// SPDX-License-Identifier: Apache-2.0
// No option without effect: one that differs from its default is read by the layer, or refused by its name.
#pragma once

#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera::core {

/// The options of a desc whose enums are known. Errors: invalid_argument, unsupported.
Status check_options_apply(MoeDesc const& desc) noexcept;

/// alpha, limit and up_offset, which clamped_swiglu alone reads. Errors: invalid_argument.
Status check_options_apply(Activation const& activation) noexcept;

}  // namespace tessera::core
