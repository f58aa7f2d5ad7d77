// SPDX-License-Identifier: Apache-2.0
// The rules a MoeDesc must keep, whatever the backend.
#pragma once

#include "tessera/moe.hpp"
#include "tessera/router.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera::core {

/// Sizes in range, enums known, options consistent. Errors: invalid_argument.
Status check_desc(MoeDesc const& desc) noexcept;

/// The same layer with its router in one spelling. Of a checked desc.
inline MoeDesc resolved(MoeDesc desc) noexcept {
  desc.router = tessera::resolved(desc.router);
  return desc;
}

/// The parameters of clamped_swiglu, and that no other activation has any. Errors: invalid_argument.
Status check_activation(Activation const& activation) noexcept;

/// Refuses a `pass` that is none of the enum's.
Status check_pass(Pass pass) noexcept;

/// Upper bound of P, T and E*max(w*n,d): indices are int32 on every device.
inline constexpr std::int64_t kMaxIndex = 0x7fffffff;

}  // namespace tessera::core
