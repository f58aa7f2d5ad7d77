// SPDX-License-Identifier: Apache-2.0
// dw_up[e][i,c] = sum over rows r of e of dh[r,i] * x[t_r,c];  db_up[e][i] = sum of dh[r,i]
#include <algorithm>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {

/// One destination matrix: some columns of dh (all of w_up's rows, or the gate or up half).
struct Part {
  Matrix destination;  ///< [columns of dh, d] of expert 0
  std::int64_t expert_stride = 0;
  std::int64_t first = 0, count = 0;  ///< columns of dh
};

void weight_gradient(Layer const& layer, UpWgradArgs const& args, Part const& part,
                     Threads const& threads) noexcept {
  if (part.destination.data == nullptr) return;
  std::int64_t const width = layer.up_columns();
  for_each_column_block(
      layer, threads,
      [&](std::int64_t expert, std::int64_t column, std::int64_t columns, int slot) {
        float* const gathered = threads.scratch(slot);
        float* const scratch = gathered + kRowBlock * kColumnBlock + std::max(kColumnBlock, width);
        Matrix const destination{part.destination.data + expert * part.expert_stride,
                                 part.destination.row_stride, part.destination.col_stride};
        WgradSum sum(part.count, columns, destination.from(0, column), args.mode, scratch);
        std::int64_t const end = layer.first_row(expert) + layer.num_rows(expert);
        for (std::int64_t row = layer.first_row(expert); row < end; row += kRowBlock) {
          std::int64_t const rows = std::min(kRowBlock, end - row);
          gather_rows(args.x, layer.routing.gather_index, row, rows, column, columns, gathered);
          ConstMatrix const dh{args.dh + row * width + part.first, width, 1};
          sum.add(rows, dh.transposed(), {gathered, columns, 1});
        }
        sum.finish();
      });
}

void bias_gradient(Layer const& layer, UpWgradArgs const& args, Threads const& threads) noexcept {
  auto const& db = args.db_up;
  if (db.gate == nullptr && db.up == nullptr) return;
  std::int64_t const width = layer.up_columns(), n = layer.intermediate();
  bool const separate = layer.w_up.separate;
  threads.pool.run(layer.experts(), [&](std::int64_t expert, int slot) {
    float* const sum = threads.scratch(slot) + kRowBlock * kColumnBlock;
    std::fill_n(sum, width, 0.0f);
    std::int64_t const end = layer.first_row(expert) + layer.num_rows(expert);
    for (std::int64_t row = layer.first_row(expert); row < end; ++row) {
      for (std::int64_t i = 0; i < width; ++i) sum[i] += args.dh[row * width + i];
    }
    bool const has_rows = layer.num_rows(expert) > 0;
    if (db.gate != nullptr) {
      store_bias_gradient(sum, separate ? n : width, has_rows, args.mode,
                          db.gate + expert * db.gate_expert_stride);
    }
    if (db.up != nullptr) {
      store_bias_gradient(sum + n, n, has_rows, args.mode, db.up + expert * db.up_expert_stride);
    }
  });
}

}  // namespace

void up_projection_wgrad(Layer const& layer, UpWgradArgs const& args,
                         Threads const& threads) noexcept {
  std::int64_t const n = layer.intermediate();
  auto const& dw = args.dw_up;
  if (layer.w_up.separate) {
    weight_gradient(layer, args, {dw.gate, dw.gate_expert_stride, 0, n}, threads);
    weight_gradient(layer, args, {dw.up, dw.up_expert_stride, n, n}, threads);
  } else {
    weight_gradient(layer, args, {dw.joined, dw.expert_stride, 0, layer.up_columns()}, threads);
  }
  bias_gradient(layer, args, threads);
}

}  // namespace tessera::cpu
