// SPDX-License-Identifier: Apache-2.0
// out_t = (out_t) + sum over slots j of t, ascending, of s_j * rows[inverse_permutation[j]]
#include <algorithm>

#include "core/simd.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

TESSERA_SIMD void add_row(float const* row, float score, std::int64_t columns,
                          float* out) noexcept {
  for (std::int64_t c = 0; c < columns; ++c) out[c] += score * row[c];
}

}  // namespace

void aggregate(Layer const& layer, AggregateArgs const& args, Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), tokens = layer.tokens();
  RoutingView const& routing = layer.routing;
  auto const first_slot = [&](std::int64_t t) {
    return routing.token_offsets != nullptr ? std::int64_t{routing.token_offsets[t]}
                                            : t * layer.desc.shape.top_k;
  };
  std::int64_t const blocks = (tokens + kAggregateTokens - 1) / kAggregateTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const end = std::min(tokens, (block + 1) * kAggregateTokens);
    for (std::int64_t t = block * kAggregateTokens; t < end; ++t) {
      float* const out = args.out[t];
      if (!args.add_to_out) std::fill_n(out, d, 0.0f);
      for (std::int64_t slot = first_slot(t); slot < first_slot(t + 1); ++slot) {
        std::int64_t const row = routing.inverse_permutation[slot];
        if (row < 0) continue;  // sentinel: its score, even NaN, is not used
        add_row(args.rows + row * d, args.scores != nullptr ? args.scores[slot] : 1.0f, d, out);
      }
    }
  });
}

}  // namespace tessera::cpu
