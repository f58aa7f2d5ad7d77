// SPDX-License-Identifier: Apache-2.0
// dw_up[e][i,c] = sum over rows r of e of dh[r,i] * x[t_r,c];  db_up[e][i] = sum of dh[r,i]
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {

/// One destination matrix: some columns of dh (all of w_up's rows, or the gate or up half).
template <class G>
struct Part {
  MatrixView<G> destination;  ///< [columns of dh, d] of expert 0
  std::int64_t expert_stride = 0;
  std::int64_t first = 0, count = 0;  ///< columns of dh
};

template <class T, class G>
void weight_gradient(Layer<T> const& layer, UpWgradArgs<T, G> const& args, Part<G> const& part,
                     Threads const& threads) noexcept {
  if (part.destination.data == nullptr) return;
  std::int64_t const width = layer.up_columns();
  for_each_column_block(
      layer, threads,
      [&](std::int64_t expert, std::int64_t column, std::int64_t columns, int slot) {
        float* const scratch = threads.scratch(slot) + std::max(kWideColumnBlock, width);
        std::int64_t const first = layer.first_row(expert), rows = layer.num_rows(expert);
        MatrixView<T const> const x = args.x.matrix().from(0, column);
        MatrixView<G> const dw = part.destination.from_offset(expert * part.expert_stride);
        for (std::int64_t i = 0; i < part.count; i += kSumBlock) {
          WgradSum<G> sum(std::min(kSumBlock, part.count - i), columns, rows, dw.from(i, column),
                          args.mode, scratch);
          for (std::int64_t row = first; row < first + rows; row += kReductionBlock) {
            MatrixView<T const> const dh{args.dh + row * width + part.first + i, width, 1};
            sum.add(std::min(kReductionBlock, first + rows - row), left_operand_transposed(dh),
                    right_operand(x, layer.routing.gather_index + row));
          }
          sum.finish();
        }
      });
}

template <class T, class G>
void bias_gradient(Layer<T> const& layer, UpWgradArgs<T, G> const& args,
                   Threads const& threads) noexcept {
  auto const& db = args.db_up;
  if (db.gate == nullptr && db.up == nullptr) return;
  std::int64_t const width = layer.up_columns(), n = layer.intermediate();
  bool const separate = layer.w_up.separate;
  auto const sum_expert = [&](std::int64_t expert, int slot) {
    float* const sum = threads.scratch(slot);
    std::fill_n(sum, width, 0.0f);
    std::int64_t const end = layer.first_row(expert) + layer.num_rows(expert);
    for (std::int64_t row = layer.first_row(expert); row < end; ++row) {
      for (std::int64_t i = 0; i < width; ++i) sum[i] += to_fp32(args.dh[row * width + i]);
    }
    bool const has_rows = layer.num_rows(expert) > 0;
    if (db.gate != nullptr) {
      store_bias_gradient(sum, separate ? n : width, has_rows, args.mode,
                          db.gate + expert * db.gate_expert_stride);
    }
    if (db.up != nullptr) {
      store_bias_gradient(sum + n, n, has_rows, args.mode, db.up + expert * db.up_expert_stride);
    }
  };
  threads.pool.run(layer.experts(), sum_expert, layer.multiply_adds());
}

}  // namespace

template <class T, class G>
void up_projection_wgrad(Layer<T> const& layer, UpWgradArgs<T, G> const& args,
                         Threads const& threads) noexcept {
  std::int64_t const n = layer.intermediate();
  auto const& dw = args.dw_up;
  if (layer.w_up.separate) {
    weight_gradient(layer, args, Part<G>{dw.gate, dw.gate_expert_stride, 0, n}, threads);
    weight_gradient(layer, args, Part<G>{dw.up, dw.up_expert_stride, n, n}, threads);
  } else {
    weight_gradient(layer, args, Part<G>{dw.joined, dw.expert_stride, 0, layer.up_columns()},
                    threads);
  }
  bias_gradient(layer, args, threads);
}

template void up_projection_wgrad(Layer<float> const&, UpWgradArgs<float, float> const&,
                                  Threads const&) noexcept;
template void up_projection_wgrad(Layer<Bf16> const&, UpWgradArgs<Bf16, Bf16> const&,
                                  Threads const&) noexcept;
template void up_projection_wgrad(Layer<Bf16> const&, UpWgradArgs<Bf16, float> const&,
                                  Threads const&) noexcept;

}  // namespace tessera::cpu
