// SPDX-License-Identifier: Apache-2.0
// The ops of a layer that quantises its operands (MoeDesc::quantises()): products of dequantised values, one expert
// after another; the other ops are those of ops.hpp. Rows are quantised where they are read, in a thread's scratch, so
// that codes exist of x and h alone, which are saved.
#pragma once

#include <cstdint>

#include "cpu/parallel/ops.hpp"
#include "cpu/parallel/quantise.hpp"

namespace tessera::cpu {

/// Rows of gate, or of up, [n,d] of an expert, whatever the layout.
template <class T>
GroupedRows<T const> up_rows(MoeDesc const& desc, UpMatrices<T const> const& matrices,
                             std::int64_t expert, bool gate) noexcept {
  if (matrices.separate) {
    return {gate ? matrices.gate_of(expert) : matrices.up_of(expert)};
  }
  MatrixView<T const> view = matrices.of(expert);
  if (!desc.activation.gated()) return {view};
  std::int64_t const n = desc.shape.intermediate, block = desc.layout.block;
  switch (desc.layout.order) {
    case GateUpOrder::concat:
      return {view.from(gate ? 0 : n, 0)};
    case GateUpOrder::up_first:
      return {view.from(gate ? n : 0, 0)};
    case GateUpOrder::interleaved:
      view = view.from(gate ? 0 : 1, 0);
      view.row_stride *= 2;
      return {view};
    case GateUpOrder::blocked:
      break;
  }
  return {view.from(gate ? 0 : block, 0), block, 2 * block * view.row_stride};
}

/// Codes of rows, `pitch` apart, with the scales of their blocks; null codes: not kept.
struct QuantisedRows {
  core::E4m3* codes = nullptr;
  std::int64_t pitch = 0;
  ScaleView scales = {};
};

/// h_r = x8_t w8_up[e]^T + b_up[e], hb_r = rnd(h_r), y_r = rnd(a8_r w8_down[e]^T + b_down[e]) with a8 of act(hb).
struct QuantisedForward {
  Rows<Bf16 const> x;       ///< [T,d]
  QuantisedRows x8;         ///< [T,d], written
  QuantisedRows h8;         ///< [P,w*n], written: the halves of gate and up of hb
  Bf16* y = nullptr;        ///< [P,d]
  float* expert = nullptr;  ///< quantised_expert_floats(desc)
};
void quantised_forward(Layer<Bf16> const& layer, QuantisedForward const& args,
                       Threads const& threads) noexcept;

/// dA' = dO8_t w8_down[e]; ds, dh and a_scaled of it and of h8 as down_projection_dgrad() computes them.
struct QuantisedDownDgrad {
  Rows<Bf16 const> d_o;      ///< [T,d]
  QuantisedRows x8;          ///< read where h8 is null, to make it again
  QuantisedRows h8;          ///< read
  Bf16* dh = nullptr;        ///< [P,w*n], columns as without quantising
  Bf16* a_scaled = nullptr;  ///< [P,n]
  float* dscores = nullptr;  ///< [P] by slot, 0 at sentinels; or null
  float* expert = nullptr;   ///< quantised_expert_floats(desc)
};
void quantised_down_dgrad(Layer<Bf16> const& layer, QuantisedDownDgrad const& args,
                          Threads const& threads) noexcept;

/// dx_rows_r = rnd(dh8_r w8_up[e]), [P,d].
void quantised_up_dgrad(Layer<Bf16> const& layer, Bf16 const* dh, Bf16* dx_rows, float* expert,
                        Threads const& threads) noexcept;

/// x^ = rnd(x8 s), [T,d]: what gradients of weights read.
void dequantise_x(MoeDesc const& desc, QuantisedRows const& x8, Bf16* x,
                  Threads const& threads) noexcept;

/// Scratch of all of them.
std::int64_t quantised_scratch(MoeDesc const& desc) noexcept;
/// Floats of one expert's weights and biases, dequantised.
std::int64_t quantised_expert_floats(MoeDesc const& desc) noexcept;

}  // namespace tessera::cpu
