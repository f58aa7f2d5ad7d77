// SPDX-License-Identifier: Apache-2.0
// dw_down[e][c,i] = sum over rows r of e of dO[t_r,c] * a_scaled[r,i];  db_down[e][c] = sum of s_j dO[t_r,c]
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {

// Scratch: a bias sum [max(kWideColumnBlock, w*n)], then that of WgradSum.
std::int64_t wgrad_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const width = desc.up_width() * desc.shape.intermediate;
  return std::max(kWideColumnBlock, width) +
         wgrad_sum_floats(std::min(kWideColumnBlock, desc.shape.hidden),
                          std::min(kSumBlock, width));
}

template <class T, class G>
void down_projection_wgrad(Layer<T> const& layer, DownWgradArgs<T, G> const& args,
                           Threads const& threads) noexcept {
  bool const weights = args.dw_down.matrix.data != nullptr, biases = args.db_down.data != nullptr;
  if (!weights && !biases) return;
  std::int64_t const n = layer.intermediate();
  RoutingView const& routing = layer.routing;
  for_each_column_block(
      layer, threads,
      [&](std::int64_t expert, std::int64_t column, std::int64_t columns, int slot) {
        float* const bias_sum = threads.scratch(slot);
        float* const scratch = bias_sum + std::max(kWideColumnBlock, layer.up_columns());
        std::int64_t const first = layer.first_row(expert), rows = layer.num_rows(expert);
        MatrixView<T const> const d_o = args.d_o.matrix().from(0, column);
        for (std::int64_t i = 0; weights && i < n; i += kSumBlock) {
          WgradSum<G> sum(columns, std::min(kSumBlock, n - i), rows,
                          args.dw_down.of(expert).from(column, i), args.mode, scratch);
          for (std::int64_t row = first; row < first + rows; row += kReductionBlock) {
            sum.add(std::min(kReductionBlock, first + rows - row),
                    left_operand_transposed(d_o, routing.gather_index + row),
                    right_operand(MatrixView<T const>{args.a_scaled + row * n + i, n, 1}));
          }
          sum.finish();
        }
        if (!biases) return;
        std::fill_n(bias_sum, columns, 0.0f);
        for (std::int64_t row = first; row < first + rows; ++row) {
          float const score = routing.scores[routing.sort_permutation[row]];
          T const* const values = args.d_o[routing.gather_index[row]] + column;
          for (std::int64_t c = 0; c < columns; ++c) bias_sum[c] += score * to_fp32(values[c]);
        }
        store_bias_gradient(bias_sum, columns, rows > 0, args.mode,
                            args.db_down.of(expert) + column);
      });
}

template void down_projection_wgrad(Layer<float> const&, DownWgradArgs<float, float> const&,
                                    Threads const&) noexcept;
template void down_projection_wgrad(Layer<Bf16> const&, DownWgradArgs<Bf16, Bf16> const&,
                                    Threads const&) noexcept;
template void down_projection_wgrad(Layer<Bf16> const&, DownWgradArgs<Bf16, float> const&,
                                    Threads const&) noexcept;

}  // namespace tessera::cpu
