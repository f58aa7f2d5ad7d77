// SPDX-License-Identifier: Apache-2.0
// The routers' scores and gradients as the textbook writes them, in fp32.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::verify {

/// Scores [K] of one token's chosen experts from its logits [E].
std::vector<float> naive_scores(MoeDesc const& desc, float const* logits,
                                std::int64_t const* chosen);

/// dlogits [E] of one token from the gradients [K] of its scores.
std::vector<float> naive_logit_gradient(MoeDesc const& desc, float const* logits,
                                        std::int64_t const* chosen, float const* dscores);

}  // namespace tessera::verify
