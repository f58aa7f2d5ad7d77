// SPDX-License-Identifier: Apache-2.0
// y_r = a_r w_down[e]^T + b_down[e]
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {

std::int64_t down_projection_fwd_scratch(MoeDesc const& desc) noexcept {
  return gemm_scratch_floats(kRowBlock, desc.shape.hidden, desc.shape.intermediate);
}

template <class T>
void down_projection_fwd(Layer<T> const& layer, T const* a, Columns columns, T* y,
                         Threads const& threads) noexcept {
  std::int64_t const n = layer.intermediate();
  for_each_row_block(layer, threads, [&](RowBlock const& block) {
    auto const& [expert, row, rows, slot, weights] = block;
    auto const w_down = layer.w_down.of(expert).from(columns.first, 0);
    T const* const bias =
        layer.b_down.data == nullptr ? nullptr : layer.b_down.of(expert) + columns.first;
    MatrixView<T> const out{y + row * columns.count, columns.count, 1};
    gemm(rows, columns.count, n, left_operand(MatrixView<T const>{a + row * n, n, 1}),
         right_operand(w_down.transposed()), result(out, bias), threads.scratch(slot), weights);
  });
}

template void down_projection_fwd(Layer<float> const&, float const*, Columns, float*,
                                  Threads const&) noexcept;
template void down_projection_fwd(Layer<Bf16> const&, Bf16 const*, Columns, Bf16*,
                                  Threads const&) noexcept;

}  // namespace tessera::cpu
