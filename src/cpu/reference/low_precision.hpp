// SPDX-License-Identifier: Apache-2.0
// The layer with quantised operands: the same equations in fp64, on values that were quantised and dequantised.
#pragma once

#include "cpu/reference/layer.hpp"
#include "cpu/reference/quantise.hpp"

namespace tessera::reference {

/// Holds what is quantised and rounded. Blocks along the reduction: 1 x `columns` of activations; those of weights are
/// square, or 1 x `columns` along each reduction, of the same weights.
struct Recipe {
  bool quantise = true;  ///< false: operands are what they are
  /// To bf16: hb, a that is not quantised, y, o, dh, a', dx rows, dx and weight gradients; false: nothing is.
  bool round = true;
  std::int64_t columns = 128;
  bool square_weights = true;
  ScaleRule rule = ScaleRule::fp32;
  bool save_x8 = true;  ///< up_projection_wgrad reads rnd(x8 s), or x
  bool save_h8 = true;  ///< backward reads h8, or hb
  double offset =
      0;  ///< h, dh and a' are 1 + offset of their sums, which near a tie gives other codes
};
inline constexpr Recipe fp8_block(ScaleRule rule) { return {.rule = rule}; }
inline constexpr Recipe mxfp8(ScaleRule rule) {
  return {.columns = 32, .square_weights = false, .rule = rule};
}
/// Nothing quantised, nothing rounded: forward() and backward().
inline constexpr Recipe kExact{.quantise = false, .round = false};

struct LowPrecisionForward {
  Inputs inputs;    ///< x as up_projection_wgrad and the router's gradient read it: of x8, or x
  Forward forward;  ///< h as backward reads it, with a = act(h); weights as the dgrads read them
  Values a;         ///< what the down projection read
};

/// h = x8 w8_up^T, hb = rnd(h), a8 of act(hb), y = rnd(a8 w8_down^T), o = rnd(sum of s y). The router reads x.
LowPrecisionForward low_precision_forward(Inputs const& inputs, Recipe const& recipe);

/// dA' = dO8 w8_down; ds, dh and a' from the saved h; dx rows = rnd(dh8 w8_up); weight gradients of dO, a' and dh,
/// rounded.
Backward low_precision_backward(Recipe const& recipe, LowPrecisionForward const& forward,
                                Values const& d_o);

}  // namespace tessera::reference
