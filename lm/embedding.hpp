// SPDX-License-Identifier: Apache-2.0
// x_t = embedding[token_t]      d_embedding[v] += sum over t with token_t = v of dx_t
#pragma once

#include <cstdint>
#include <span>

#include "tessera/context.hpp"

namespace tessera::lm {

void embedding_fwd(Context const& context, std::span<std::uint8_t const> tokens,
                   std::int64_t hidden, float const* embedding, float* x);

/// Adds to d_embedding, which holds the gradient of the tied output already.
void embedding_bwd(Context const& context, std::span<std::uint8_t const> tokens,
                   std::int64_t hidden, float const* dx, float* d_embedding);

}  // namespace tessera::lm
