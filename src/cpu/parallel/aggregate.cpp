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
  std::int64_t const blocks = (tokens + kAggregateTokens - 1) / kAggregateTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const end = std::min(tokens, (block + 1) * kAggregateTokens);
    for (std::int64_t t = block * kAggregateTokens; t < end; ++t) {
      float* const out = args.out[t];
      if (!args.add_to_out) std::fill_n(out, d, 0.0f);
      SlotRange const slots = slots_of(layer.desc, routing, t);
      for (std::int64_t slot = slots.first; slot < slots.end; ++slot) {
        std::int64_t const row = routing.inverse_permutation[slot];
        if (row < 0) continue;  // sentinel: its score, even NaN, is not used
        add_row(args.rows + row * d, args.scores != nullptr ? args.scores[slot] : 1.0f, d, out);
      }
    }
  });
}

}  // namespace tessera::cpu
