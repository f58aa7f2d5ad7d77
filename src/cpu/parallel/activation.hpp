// SPDX-License-Identifier: Apache-2.0
// a = act(h) and its backward on rows of h, for every activation and every order of gate and up columns.
#pragma once

#include <cstdint>

#include "tessera/shape.hpp"

namespace tessera::cpu {

/// Where the elements of a row of h stand: n = runs of `run`, run q starts at q*run_pitch, and its element i
/// has its gate at gate_first + i*stride, its up value at up_first + i*stride. Not gated: gate only.
struct HColumns {
  std::int64_t gate_first = 0, up_first = 0, stride = 1, run = 0, run_pitch = 0;
};
HColumns h_columns(MoeDesc const& desc) noexcept;

/// a [rows,n] = act(h [rows,w*n]).
void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h, float* a) noexcept;

/// From h and da_unscaled (dA', before the score): dh = J^T (score * da_unscaled), a_scaled = score * a, and
/// da_dot_a[row] = <dA', a>. scores[row] is the row's score.
struct ActivationBackward {
  std::int64_t rows = 0;
  float const* h = nullptr;
  float const* da_unscaled = nullptr;
  float const* scores = nullptr;
  float* dh = nullptr;
  float* a_scaled = nullptr;
  float* da_dot_a = nullptr;
};
void activation_backward(MoeDesc const& desc, ActivationBackward const& args) noexcept;

/// <a, b> of count floats, in 16 interleaved partial sums added pairwise: one order for every machine.
float dot(float const* a, float const* b, std::int64_t count) noexcept;

}  // namespace tessera::cpu
