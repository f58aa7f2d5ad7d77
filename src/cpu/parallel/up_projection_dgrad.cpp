// SPDX-License-Identifier: Apache-2.0
// dx_rows_r = dh_r w_up[e]
#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

/// The two halves of dh in one product of fp32 sums, rounded once.
template <class T>
void separate_product(Layer<T> const& layer, std::int64_t expert, std::int64_t rows,
                      MatrixView<T const> const& dh, Columns columns, MatrixView<T> const& out,
                      float* scratch) noexcept {
  std::int64_t const n = layer.intermediate();
  constexpr bool kRounds = !std::is_same_v<T, float>;
  Matrix sums{scratch, columns.count, 1};
  if constexpr (kRounds) {
    scratch += kRowBlock * columns.count;
  } else {
    sums = out;
  }
  GemmResult c = result(sums);
  gemm(rows, columns.count, n, left_operand(dh),
       right_operand(layer.w_up.gate_of(expert).from(0, columns.first)), c, scratch);
  c.add = true;
  gemm(rows, columns.count, n, left_operand(dh.from(0, n)),
       right_operand(layer.w_up.up_of(expert).from(0, columns.first)), c, scratch);
  if constexpr (kRounds) round_values(sums.data, rows * columns.count, out.data);
}

}  // namespace

std::int64_t up_projection_dgrad_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const columns = column_chunk(desc);
  bool const sums =
      desc.dtype != DType::fp32 && desc.layout.orientation == WeightOrientation::separate;
  return gemm_scratch_floats(kRowBlock, columns, desc.up_width() * desc.shape.intermediate) +
         (sums ? kRowBlock * columns : 0);
}

template <class T>
void up_projection_dgrad(Layer<T> const& layer, T const* dh, Columns columns, T* dx_rows,
                         Threads const& threads) noexcept {
  std::int64_t const width = layer.up_columns();
  for_each_row_block(layer, threads, [&](RowBlock const& block) {
    auto const& [expert, row, rows, slot, weights] = block;
    MatrixView<T const> const dh_block{dh + row * width, width, 1};
    MatrixView<T> const out{dx_rows + row * columns.count, columns.count, 1};
    float* const scratch = threads.scratch(slot);
    if (layer.w_up.separate) {
      separate_product(layer, expert, rows, dh_block, columns, out, scratch);
    } else {
      gemm(rows, columns.count, width, left_operand(dh_block),
           right_operand(layer.w_up.of(expert).from(0, columns.first)), result(out), scratch,
           weights);
    }
  });
}

template void up_projection_dgrad(Layer<float> const&, float const*, Columns, float*,
                                  Threads const&) noexcept;
template void up_projection_dgrad(Layer<Bf16> const&, Bf16 const*, Columns, Bf16*,
                                  Threads const&) noexcept;

}  // namespace tessera::cpu
