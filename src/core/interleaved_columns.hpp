// SPDX-License-Identifier: Apache-2.0
// The columns of h and dh in the CUDA backend.
#pragma once

#include "tessera/shape.hpp"

namespace tessera::core {

/// True if columns of gate and up alternate in h and dh, [g0 u0 g1 u1 ..], as they do in w_up; else they are
/// [gate half | up half].
constexpr bool interleaves_columns(MoeDesc const& desc) noexcept {
  return desc.activation.gated() && desc.layout.orientation == WeightOrientation::transposed &&
         desc.layout.order == GateUpOrder::interleaved;
}

}  // namespace tessera::core
