// SPDX-License-Identifier: Apache-2.0
// Mean cross-entropy over tokens, in nats:  L = mean_t (log sum_v exp(l_tv) - l_t,target)
//   dl_tv = (softmax(l_t)_v - [v = target]) / T
#pragma once

#include <cstdint>
#include <span>

#include "tessera/context.hpp"

namespace tessera::lm {

/// logits [T,256]. The gradient, if wanted, replaces the logits.
double cross_entropy(Context const& context, std::span<std::uint8_t const> targets, float* logits,
                     bool gradient);

}  // namespace tessera::lm
