// SPDX-License-Identifier: Apache-2.0
// out_t = (out_t) + sum over slots j of t, ascending, of s_j * rows[inverse_permutation[j]]
#include <algorithm>

#include "core/gathered_rows.hpp"
#include "core/simd.hpp"
#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

/// Columns whose sums are kept at once: they stay in the first cache.
constexpr std::int64_t kColumns = 1024;

template <class T>
TESSERA_INLINE void add_row_of(T const* row, float score, std::int64_t columns,
                               float* sum) noexcept {
  for (std::int64_t c = 0; c < columns; ++c) sum[c] += score * to_fp32(row[c]);
}
TESSERA_SIMD void add_row(float const* row, float score, std::int64_t columns,
                          float* sum) noexcept {
  add_row_of(row, score, columns, sum);
}
TESSERA_SIMD void add_row(Bf16 const* row, float score, std::int64_t columns, float* sum) noexcept {
  add_row_of(row, score, columns, sum);
}

}  // namespace

template <class T>
void aggregate(Layer<T> const& layer, AggregateArgs<T> const& args,
               Threads const& threads) noexcept {
  std::int64_t const tokens = core::dx_rows(layer.desc), pitch = args.columns.count;
  RoutingView const& routing = layer.routing;
  auto const sum_token = [&](std::int64_t t, std::int64_t column, std::int64_t columns) {
    T* const out = args.out[t] + args.columns.first + column;
    float sum[kColumns];
    for (std::int64_t c = 0; c < columns; ++c) sum[c] = args.add_to_out ? to_fp32(out[c]) : 0.0f;
    SlotRange const slots = slots_of(layer.desc, routing, t);
    for (std::int64_t slot = slots.first; slot < slots.end; ++slot) {
      std::int64_t const row = routing.inverse_permutation[slot];
      if (row < 0) continue;  // sentinel: its score, even NaN, is not used
      add_row(args.rows + row * pitch + column, args.scores != nullptr ? args.scores[slot] : 1.0f,
              columns, sum);
    }
    round_values(sum, columns, out);
  };
  std::int64_t const blocks = (tokens + kAggregateTokens - 1) / kAggregateTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const end = std::min(tokens, (block + 1) * kAggregateTokens);
    for (std::int64_t t = block * kAggregateTokens; t < end; ++t) {
      for (std::int64_t column = 0; column < pitch; column += kColumns) {
        sum_token(t, column, std::min(kColumns, pitch - column));
      }
    }
  });
}

template void aggregate(Layer<float> const&, AggregateArgs<float> const&, Threads const&) noexcept;
template void aggregate(Layer<Bf16> const&, AggregateArgs<Bf16> const&, Threads const&) noexcept;

}  // namespace tessera::cpu
