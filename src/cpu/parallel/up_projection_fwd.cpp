// SPDX-License-Identifier: Apache-2.0
// h_r = x[gather_index[r]] w_up[e]^T + b_up[e],  a_r = act(h_r)
#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

void add_bias(float const* bias, std::int64_t columns, std::int64_t rows, std::int64_t pitch,
              float* h) noexcept {
  for (std::int64_t r = 0; r < rows; ++r, h += pitch) {
    for (std::int64_t i = 0; i < columns; ++i) h[i] += bias[i];
  }
}

/// h block [rows, w*n] of one expert from gathered x [rows, d].
void project(Layer const& layer, std::int64_t expert, std::int64_t rows, float const* gathered,
             float* h) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  ConstMatrix const x{gathered, d, 1};
  Matrix const out{h, width, 1};
  auto const& w = layer.w_up;
  if (w.separate) {
    ConstMatrix const gate{w.gate.data + expert * w.gate_expert_stride, w.gate.row_stride, 1};
    ConstMatrix const up{w.up.data + expert * w.up_expert_stride, w.up.row_stride, 1};
    gemm(rows, n, d, x, gate.transposed(), 0.0f, out);
    gemm(rows, n, d, x, up.transposed(), 0.0f, out.from(0, n));
  } else {
    ConstMatrix const joined{w.joined.data + expert * w.expert_stride, w.joined.row_stride,
                             w.joined.col_stride};
    gemm(rows, width, d, x, joined.transposed(), 0.0f, out);
  }
  auto const& b = layer.b_up;
  if (b.gate == nullptr) return;
  add_bias(b.gate + expert * b.gate_expert_stride, w.separate ? n : width, rows, width, h);
  if (w.separate) add_bias(b.up + expert * b.up_expert_stride, n, rows, width, h + n);
}

}  // namespace

std::int64_t up_projection_fwd_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const width = desc.up_width() * desc.shape.intermediate;
  return kRowBlock * (desc.shape.hidden + (desc.save == SavePolicy::h ? 0 : width));
}

void up_projection_fwd(Layer const& layer, ConstRows x, float* h, float* a,
                       Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), width = layer.up_columns();
  for_each_row_block(
      layer, threads, [&](std::int64_t expert, std::int64_t row, std::int64_t rows, int slot) {
        float* const gathered = threads.scratch(slot);
        float* const h_block = h != nullptr ? h + row * width : gathered + kRowBlock * d;
        gather_rows(x, layer.routing.gather_index, row, rows, 0, d, gathered);
        project(layer, expert, rows, gathered, h_block);
        if (a != nullptr) {
          activation_forward(layer.desc, rows, h_block, a + row * layer.intermediate());
        }
      });
}

}  // namespace tessera::cpu
