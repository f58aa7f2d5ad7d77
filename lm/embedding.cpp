// SPDX-License-Identifier: Apache-2.0
#include "lm/embedding.hpp"

#include <algorithm>

namespace tessera::lm {

namespace {
constexpr std::int64_t kColumnBlock =
    16;  // columns per task in backward: each walks all tokens in order
}

void embedding_fwd(Context const& context, std::span<std::uint8_t const> tokens,
                   std::int64_t hidden, float const* embedding, float* x) {
  constexpr std::int64_t kRowBlock = 256;
  auto const count = static_cast<std::int64_t>(tokens.size());
  context.parallel_for((count + kRowBlock - 1) / kRowBlock, [&](std::int64_t block) {
    std::int64_t const end = std::min(count, (block + 1) * kRowBlock);
    for (std::int64_t t = block * kRowBlock; t < end; ++t) {
      std::copy_n(embedding + tokens[static_cast<std::size_t>(t)] * hidden, hidden, x + t * hidden);
    }
  });
}

void embedding_bwd(Context const& context, std::span<std::uint8_t const> tokens,
                   std::int64_t hidden, float const* dx, float* d_embedding) {
  context.parallel_for((hidden + kColumnBlock - 1) / kColumnBlock, [&](std::int64_t block) {
    std::int64_t const first = block * kColumnBlock;
    std::int64_t const end = std::min(hidden, first + kColumnBlock);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      float const* const from = dx + static_cast<std::int64_t>(t) * hidden;
      float* const to = d_embedding + tokens[t] * hidden;
      for (std::int64_t column = first; column < end; ++column) to[column] += from[column];
    }
  });
}

}  // namespace tessera::lm
