// SPDX-License-Identifier: Apache-2.0
// The routers' scores and gradients as the textbook writes them, in fp32.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::verify {

/// [E]: the score with c = 1 that each expert has in one token's choice `members`, or would have as an addition to it.
std::vector<float> naive_unscaled_scores(MoeDesc const& desc, float const* logits,
                                         std::vector<std::int64_t> const& members);

/// dlogits [E] of one token; g [E] is c times the gradient of each expert's score, 0 where it has no slot.
std::vector<float> naive_logit_gradient(MoeDesc const& desc, float const* logits,
                                        std::vector<std::int64_t> const& members,
                                        std::vector<float> const& g);

}  // namespace tessera::verify
