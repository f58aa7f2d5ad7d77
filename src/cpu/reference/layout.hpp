// SPDX-License-Identifier: Apache-2.0
// The places of weights in memory. Logical: gate G, up U [E,n,d] and down D [E,d,n]; stored: MoeDesc::layout.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::reference {

/// Weights, or their gradients, as a caller stores them. Without biases the b_ arrays are empty.
struct StoredWeights {
  std::vector<double> w_up, w_gate, w_down, b_up, b_gate, b_down;
};

/// The same in one layout for all. Not gated: `up` is the only up matrix, `gate` is empty.
struct LogicalWeights {
  std::vector<double> gate, up;      ///< [E,n,d]
  std::vector<double> down;          ///< [E,d,n]
  std::vector<double> b_gate, b_up;  ///< [E,n]
  std::vector<double> b_down;        ///< [E,d]
};

enum class Part { gate, up };

/// pi_gate(i) or pi_up(i): the row of w_up that holds row i of G or U.
std::int64_t stored_row(MoeDesc const& desc, Part part, std::int64_t i);

/// All zero, sized for `desc`.
LogicalWeights zero_weights(MoeDesc const& desc);
LogicalWeights logical_weights(MoeDesc const& desc, StoredWeights const& stored);
StoredWeights stored_weights(MoeDesc const& desc, LogicalWeights const& logical);

}  // namespace tessera::reference
