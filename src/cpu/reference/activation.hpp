// SPDX-License-Identifier: Apache-2.0
// Activation functions and their derivatives, one element at a time.
#pragma once

#include "tessera/shape.hpp"

namespace tessera::reference {

/// A = phi(gate)*up, or A = phi(up) where not gated.
double activate(Activation const& activation, double gate, double up);

struct ActivationGradient {
  double gate = 0, up = 0;
};
/// (dA/dgate, dA/dup) * da.
ActivationGradient activation_gradient(Activation const& activation, double gate, double up,
                                       double da);

/// Distance of (gate, up) from the nearest point where the derivative jumps; infinite where it never does.
double distance_to_kink(Activation const& activation, double gate, double up);

}  // namespace tessera::reference
