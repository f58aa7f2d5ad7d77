// SPDX-License-Identifier: Apache-2.0
// x^ = deq(quantise(x)) and so on, along what the GEMM sums over; then the ops of layer.hpp.
#include "cpu/reference/low_precision.hpp"

#include "cpu/reference/activation.hpp"

namespace tessera::reference {
namespace {

void round(Recipe const& recipe, Values& values) {
  if (!recipe.round) return;
  for (double& value : values) value = to_bf16(value);
}

void move_and_round(Recipe const& recipe, Values& values) {
  if (recipe.offset != 0) {
    for (double& value : values) value *= 1 + recipe.offset;
  }
  round(recipe, values);
}

/// Rows as a GEMM that sums along them reads them.
Values rows_of(Recipe const& recipe, Values const& values, std::int64_t width) {
  if (!recipe.quantise || values.empty()) return values;
  std::int64_t const rows = std::ssize(values) / width;
  return dequantised(quantise(values, rows, width, {1, recipe.columns}, recipe.rule));
}

/// A weight [E*rows,width] as a GEMM reads it that sums along a row, or down a column.
Values weight_of(Recipe const& recipe, Values const& values, std::int64_t width, bool along_row) {
  if (!recipe.quantise || values.empty()) return values;
  Block block{recipe.columns, recipe.columns};
  if (!recipe.square_weights) (along_row ? block.rows : block.columns) = 1;
  return dequantised(quantise(values, std::ssize(values) / width, width, block, recipe.rule));
}

LogicalWeights weights_of(Recipe const& recipe, MoeDesc const& desc, LogicalWeights weights,
                          bool forward) {
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  weights.gate = weight_of(recipe, weights.gate, d, forward);
  weights.up = weight_of(recipe, weights.up, d, forward);
  weights.down = weight_of(recipe, weights.down, n, forward);
  return weights;
}

void activate_rows(MoeDesc const& desc, Forward& f) {
  for (std::size_t i = 0; i < f.a.size(); ++i) {
    f.a[i] = activate(desc.activation, f.h_gate.empty() ? 0 : f.h_gate[i], f.h_up[i]);
  }
}

}  // namespace

LowPrecisionForward low_precision_forward(Inputs const& inputs, Recipe const& recipe) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  LowPrecisionForward out{.inputs = inputs, .forward = begin_forward(inputs), .a = {}};
  Forward& f = out.forward;
  LogicalWeights const weights = f.weights;
  f.weights = weights_of(recipe, desc, weights, true);

  out.inputs.x = rows_of(recipe, inputs.x, d);
  up_projection_fwd(out.inputs, f);
  move_and_round(recipe, f.h_gate);
  move_and_round(recipe, f.h_up);
  activate_rows(desc, f);
  if (!recipe.quantise) round(recipe, f.a);
  f.a = rows_of(recipe, f.a, n);
  out.a = f.a;
  down_projection_fwd(inputs, f);
  round(recipe, f.y);
  f.o.assign(desc.shape.tokens * d, 0);
  aggregate(desc, f.metadata, f.y, &f.scores, f.o);
  round(recipe, f.o);

  if (recipe.save_x8) {
    round(recipe, out.inputs.x);
  } else {
    out.inputs.x = inputs.x;
  }
  if (recipe.save_h8) {
    f.h_gate = rows_of(recipe, f.h_gate, n);
    f.h_up = rows_of(recipe, f.h_up, n);
  }
  activate_rows(desc, f);
  f.weights = weights_of(recipe, desc, weights, false);
  return out;
}

Backward low_precision_backward(Recipe const& recipe, LowPrecisionForward const& forward,
                                Values const& d_o) {
  Inputs const& inputs = forward.inputs;
  Forward const& f = forward.forward;
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  Backward b;
  LogicalWeights gradients = zero_weights(desc);
  down_projection_dgrad(inputs, f, rows_of(recipe, d_o, d), b);
  move_and_round(recipe, b.dh_gate);
  move_and_round(recipe, b.dh_up);
  move_and_round(recipe, b.a_scaled);
  down_projection_wgrad(inputs, f, d_o, b, gradients);
  up_projection_wgrad(inputs, f, b, gradients);

  Backward read;  // as up_projection_dgrad reads dh
  read.dh_gate = rows_of(recipe, b.dh_gate, n);
  read.dh_up = rows_of(recipe, b.dh_up, n);
  up_projection_dgrad(inputs, f, read);
  b.dx_rows = read.dx_rows;
  round(recipe, b.dx_rows);
  b.dx.assign(desc.shape.tokens * d, 0);
  aggregate(desc, f.metadata, b.dx_rows, nullptr, b.dx);
  if (desc.router.kind != RouterKind::given) router_backward(inputs, f, b);
  round(recipe, b.dx);
  for (Values* values : {&gradients.gate, &gradients.up, &gradients.down, &gradients.b_gate,
                         &gradients.b_up, &gradients.b_down}) {
    round(recipe, *values);
  }
  b.gradients = stored_weights(desc, gradients);
  return b;
}

}  // namespace tessera::reference
