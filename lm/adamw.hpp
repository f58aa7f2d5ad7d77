// SPDX-License-Identifier: Apache-2.0
// AdamW with decoupled decay, step s counted from 1:
//   m = b1 m + (1-b1) g      v = b2 v + (1-b2) g^2
//   p -= rate * ( (m/(1-b1^s)) / (sqrt(v/(1-b2^s)) + eps) + decay * p )        norms do not decay
// g is the gradient scaled to a global norm of at most `clip`. Selection biases are left as they are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lm/parameters.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

struct AdamW {
  double beta1 = 0.9;
  double beta2 = 0.99;
  double epsilon = 1e-8;
  double decay = 0.1;
  double clip = 1.0;
};

/// The optimizer's memory: one value per parameter.
struct Moments {
  std::vector<float> first, second;
};

/// Euclidean norm of all values: fp64, blocks of fixed size added in order.
double global_norm(Context const& context, std::span<float const> values);

/// One update. Returns the gradient's norm before clipping.
double adamw_step(Context const& context, AdamW const& options, ParameterLayout const& layout,
                  std::int64_t step, double rate, std::span<float const> gradients,
                  std::span<float> parameters, Moments& moments);

/// Learning rate of `step` (from 1): linear warm-up, then half a cosine down to a tenth of the peak at
/// step `span`, and a tenth after it.
double learning_rate(double peak, std::int64_t warmup, std::int64_t span, std::int64_t step);

}  // namespace tessera::lm
