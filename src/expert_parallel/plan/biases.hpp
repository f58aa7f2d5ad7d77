// SPDX-License-Identifier: Apache-2.0
// Biases of the experts in a pass of one launch.
#pragma once

#include "core/simd.hpp"
#include "tessera/shape.hpp"

namespace tessera::expert_parallel {

/// True where the fused kernel of an activation adds biases: for that of gpt-oss, whose experts have them. In the
/// others code for it would cost passes that have none.
TESSERA_INLINE constexpr bool adds_biases(ActivationKind kind) {
  return kind == ActivationKind::clamped_swiglu;
}

}  // namespace tessera::expert_parallel
