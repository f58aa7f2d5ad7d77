// SPDX-License-Identifier: Apache-2.0
// dw_down[e][c,i] = sum over rows r of e of dO[t_r,c] * a_scaled[r,i];  db_down[e][c] = sum of s_j dO[t_r,c]
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {

// Scratch: gathered rows [kRowBlock, kColumnBlock], a bias sum [max(kColumnBlock, w*n)] and, with
// `accumulate`, the sum [max(n, w*n), kColumnBlock].
std::int64_t wgrad_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const width = desc.up_width() * desc.shape.intermediate;
  return kRowBlock * kColumnBlock + std::max(kColumnBlock, width) + kColumnBlock * width;
}

void down_projection_wgrad(Layer const& layer, DownWgradArgs const& args,
                           Threads const& threads) noexcept {
  bool const weights = args.dw_down.matrix.data != nullptr, biases = args.db_down.data != nullptr;
  if (!weights && !biases) return;
  std::int64_t const n = layer.intermediate();
  RoutingView const& routing = layer.routing;
  for_each_column_block(
      layer, threads,
      [&](std::int64_t expert, std::int64_t column, std::int64_t columns, int slot) {
        float* const gathered = threads.scratch(slot);
        float* const bias_sum = gathered + kRowBlock * kColumnBlock;
        float* const scratch = bias_sum + std::max(kColumnBlock, layer.up_columns());
        Matrix const destination =
            weights ? args.dw_down.of(expert).from(column, 0) : Matrix{scratch, n, 1};
        WgradSum sum(columns, n, destination, args.mode, scratch);
        std::fill_n(bias_sum, columns, 0.0f);
        std::int64_t const end = layer.first_row(expert) + layer.num_rows(expert);
        for (std::int64_t row = layer.first_row(expert); row < end; row += kRowBlock) {
          std::int64_t const rows = std::min(kRowBlock, end - row);
          gather_rows(args.d_o, routing.gather_index, row, rows, column, columns, gathered);
          if (weights) {
            sum.add(rows, ConstMatrix{gathered, columns, 1}.transposed(),
                    {args.a_scaled + row * n, n, 1});
          }
          for (std::int64_t r = 0; biases && r < rows; ++r) {
            float const score = routing.scores[routing.sort_permutation[row + r]];
            for (std::int64_t c = 0; c < columns; ++c)
              bias_sum[c] += score * gathered[r * columns + c];
          }
        }
        if (weights) sum.finish();
        if (biases) {
          store_bias_gradient(bias_sum, columns, layer.num_rows(expert) > 0, args.mode,
                              args.db_down.data + expert * args.db_down.expert_stride + column);
        }
      });
}

}  // namespace tessera::cpu
