// SPDX-License-Identifier: Apache-2.0
// Rotary positions (the rotate-half form). Pair (i, i + D/2) of a head at position p turns by the angle
// p * theta^(-2i/D):   x_i' = x_i cos - x_j sin,   x_j' = x_j cos + x_i sin,   j = i + D/2
// The backward pass turns back.
#pragma once

#include <cstdint>
#include <vector>

#include "lm/rms_norm.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

class RopeTable {
 public:
  RopeTable(std::int64_t positions, std::int64_t head_dim, double theta);

  /// Turns row i, a head at position (i / x.groups) % length, in place.
  void rotate(Context const& context, std::int64_t rows, std::int64_t length, Rows<float> x) const;
  void rotate_back(Context const& context, std::int64_t rows, std::int64_t length,
                   Rows<float> x) const;

 private:
  std::int64_t half_;
  std::vector<float> cosine_, sine_;  // [positions, half]
};

}  // namespace tessera::lm
