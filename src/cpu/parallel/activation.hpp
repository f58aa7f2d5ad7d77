// SPDX-License-Identifier: Apache-2.0
// a = act(h) and its backward on rows of h, for every activation and every order of gate and up columns.
#pragma once

#include <cstdint>

#include "core/bf16.hpp"
#include "tessera/shape.hpp"

namespace tessera::cpu {

/// Where the elements of a row of h stand: n = runs of `run`, run q starts at q*run_pitch, and its element i
/// has its gate at gate_first + i*stride, its up value at up_first + i*stride. Not gated: gate only.
struct HColumns {
  std::int64_t gate_first = 0, up_first = 0, stride = 1, run = 0, run_pitch = 0;
};
HColumns h_columns(MoeDesc const& desc) noexcept;

/// a [rows,n] = act(h [rows,w*n]), h before it is rounded.
void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h, float* a) noexcept;
void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h,
                        core::Bf16* a) noexcept;

/// From h and da_unscaled (dA', before the score): dh = J^T (score * da_unscaled), a_scaled = score * a, and
/// da_dot_a[row] = <dA', a>. scores[row] is the row's score, a_row scratch [n].
template <class T>
struct ActivationBackward {
  std::int64_t rows = 0;
  T const* h = nullptr;
  float const* da_unscaled = nullptr;
  float const* scores = nullptr;
  T* dh = nullptr;
  T* a_scaled = nullptr;
  float* da_dot_a = nullptr;
  float* a_row = nullptr;
};
void activation_backward(MoeDesc const& desc, ActivationBackward<float> const& args) noexcept;
void activation_backward(MoeDesc const& desc, ActivationBackward<core::Bf16> const& args) noexcept;

/// <a, b> of count elements, in 16 interleaved partial sums added pairwise: one order for every machine.
float dot(float const* a, float const* b, std::int64_t count) noexcept;
float dot(core::Bf16 const* a, core::Bf16 const* b, std::int64_t count) noexcept;

/// One rounding of each value.
void round_values(float const* values, std::int64_t count, float* out) noexcept;
void round_values(float const* values, std::int64_t count, core::Bf16* out) noexcept;

}  // namespace tessera::cpu
