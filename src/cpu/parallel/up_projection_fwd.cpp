// SPDX-License-Identifier: Apache-2.0
// h_r = x[gather_index[r]] w_up[e]^T + b_up[e],  a_r = act(h_r)
#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

template <class T>
void add_bias(T const* bias, std::int64_t columns, std::int64_t rows, std::int64_t pitch,
              float* h) noexcept {
  for (std::int64_t r = 0; r < rows; ++r, h += pitch) {
    for (std::int64_t i = 0; i < columns; ++i) h[i] += to_fp32(bias[i]);
  }
}

/// The sums of h [rows, w*n], before rounding, of one expert's rows.
template <class T>
void project(Layer<T> const& layer, RowBlock const& block, PanelSource const& x, float* h,
             float* scratch) noexcept {
  std::int64_t const expert = block.expert, rows = block.rows;
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  Matrix const out{h, width, 1};
  auto const& w = layer.w_up;
  if (w.separate) {
    gemm(rows, n, d, x, right_operand(w.gate_of(expert).transposed()), result(out), scratch);
    gemm(rows, n, d, x, right_operand(w.up_of(expert).transposed()), result(out.from(0, n)),
         scratch);
  } else {
    gemm(rows, width, d, x, right_operand(w.of(expert).transposed()), result(out), scratch,
         block.weights);
  }
  auto const& b = layer.b_up;
  if (b.gate == nullptr) return;
  add_bias(b.gate + expert * b.gate_expert_stride, w.separate ? n : width, rows, width, h);
  if (w.separate) add_bias(b.up + expert * b.up_expert_stride, n, rows, width, h + n);
}

/// The block of h needs scratch unless it can be summed where it is kept.
bool sums_in_place(MoeDesc const& desc) noexcept {
  return desc.dtype == DType::fp32 && desc.save == SavePolicy::h;
}

}  // namespace

std::int64_t up_projection_fwd_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const width = desc.up_width() * desc.shape.intermediate;
  return gemm_scratch_floats(kRowBlock, width, desc.shape.hidden) +
         (sums_in_place(desc) ? 0 : kRowBlock * width);
}

template <class T>
void up_projection_fwd(Layer<T> const& layer, Rows<T const> x, T* h, T* a,
                       Threads const& threads) noexcept {
  std::int64_t const width = layer.up_columns();
  std::int64_t const gemm_floats = gemm_scratch_floats(kRowBlock, width, layer.hidden());
  for_each_row_block(layer, threads, [&](RowBlock const& block) {
    std::int64_t const row = block.row, rows = block.rows;
    float* const scratch = threads.scratch(block.slot);
    float* sums = scratch + gemm_floats;
    if constexpr (std::is_same_v<T, float>) {
      if (h != nullptr) sums = h + row * width;
    }
    PanelSource const gathered = left_operand(x.matrix(), layer.routing.gather_index + row);
    project(layer, block, gathered, sums, scratch);
    if constexpr (!std::is_same_v<T, float>) {
      if (h != nullptr) round_values(sums, rows * width, h + row * width);
    }
    if (a != nullptr) {
      activation_forward(layer.desc, rows, sums, a + row * layer.intermediate());
    }
  });
}

template void up_projection_fwd(Layer<float> const&, Rows<float const>, float*, float*,
                                Threads const&) noexcept;
template void up_projection_fwd(Layer<Bf16> const&, Rows<Bf16 const>, Bf16*, Bf16*,
                                Threads const&) noexcept;

}  // namespace tessera::cpu
