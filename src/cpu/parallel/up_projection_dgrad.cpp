// SPDX-License-Identifier: Apache-2.0
// dx_rows_r = dh_r w_up[e]
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {

void up_projection_dgrad(Layer const& layer, float const* dh, float* dx_rows,
                         Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  auto const& w = layer.w_up;
  for_each_row_block(
      layer, threads, [&](std::int64_t expert, std::int64_t row, std::int64_t rows, int) {
        ConstMatrix const dh_block{dh + row * width, width, 1};
        Matrix const out{dx_rows + row * d, d, 1};
        if (w.separate) {
          gemm(rows, d, n, dh_block,
               {w.gate.data + expert * w.gate_expert_stride, w.gate.row_stride, 1}, 0.0f, out);
          gemm(rows, d, n, dh_block.from(0, n),
               {w.up.data + expert * w.up_expert_stride, w.up.row_stride, 1}, 1.0f, out);
        } else {
          gemm(rows, d, width, dh_block,
               {w.joined.data + expert * w.expert_stride, w.joined.row_stride, w.joined.col_stride},
               0.0f, out);
        }
      });
}

}  // namespace tessera::cpu
