// SPDX-License-Identifier: Apache-2.0
// y_r = a_r w_down[e]^T + b_down[e]
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {

void down_projection_fwd(Layer const& layer, float const* a, float* y,
                         Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate();
  for_each_row_block(
      layer, threads, [&](std::int64_t expert, std::int64_t row, std::int64_t rows, int) {
        float* const out = y + row * d;
        gemm(rows, d, n, {a + row * n, n, 1}, layer.w_down.of(expert).transposed(), 0.0f,
             {out, d, 1});
        if (layer.b_down.data == nullptr) return;
        float const* const bias = layer.b_down.data + expert * layer.b_down.expert_stride;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < d; ++c) out[r * d + c] += bias[c];
        }
      });
}

}  // namespace tessera::cpu
