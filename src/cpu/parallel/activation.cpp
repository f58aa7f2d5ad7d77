// SPDX-License-Identifier: Apache-2.0
// a = act(h) and its backward, row by row; the formulas: core/activation_math.hpp.
#include "cpu/parallel/activation.hpp"

#include <algorithm>

#include "core/activation_math.hpp"
#include "core/simd.hpp"

namespace tessera::cpu {
namespace {

using core::ActivationGradient;
using core::Bf16;
using core::round_to;
using core::to_fp32;
using core::visit_activation;

// One run of a row; kStride is a template value so that the usual stride of 1 is vectorised.
template <std::int64_t kStride, class Act, class T>
TESSERA_INLINE void forward_run(Act act, std::int64_t count, float const* gate, float const* up,
                                T* a) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    float const u = Act::kGated ? up[i * kStride] : 0.0f;
    a[i] = round_to<T>(act.forward(gate[i * kStride], u));
  }
}

template <class Act, class T>
TESSERA_INLINE void forward_rows(Act act, HColumns const& at, std::int64_t width, std::int64_t n,
                                 std::int64_t rows, float const* h, T* a) noexcept {
  for (std::int64_t r = 0; r < rows; ++r, h += width, a += n) {
    for (std::int64_t first = 0, base = 0; first < n; first += at.run, base += at.run_pitch) {
      float const* const gate = h + base + at.gate_first;
      float const* const up = h + base + at.up_first;
      if (at.stride == 1) {
        forward_run<1>(act, at.run, gate, up, a + first);
      } else {
        forward_run<2>(act, at.run, gate, up, a + first);
      }
    }
  }
}

// `a` is the unscaled activation in fp32: ds needs it unrounded.
template <std::int64_t kStride, class Act, class T>
TESSERA_INLINE void backward_run(Act act, std::int64_t count, float score, T const* gate,
                                 T const* up, float const* da, T* dgate, T* dup,
                                 float* a) noexcept {
#pragma GCC ivdep  // no array overlaps another; too many for the compiler to check
  for (std::int64_t i = 0; i < count; ++i) {
    float const u = Act::kGated ? to_fp32(up[i * kStride]) : 0.0f;
    ActivationGradient const gradient = act.backward(to_fp32(gate[i * kStride]), u, score * da[i]);
    dgate[i * kStride] = round_to<T>(gradient.dg);
    if (Act::kGated) dup[i * kStride] = round_to<T>(gradient.du);
    a[i] = gradient.a;
  }
}

template <class Act, class T>
TESSERA_INLINE void backward_rows(Act act, HColumns const& at, std::int64_t width, std::int64_t n,
                                  ActivationBackward<T> const& args) noexcept {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    T const* const h = args.h + r * width;
    T* const dh = args.dh + r * width;
    float const* const da = args.da_unscaled + r * n;
    float* const a = args.a_row;
    float const score = args.scores[r];
    for (std::int64_t first = 0, base = 0; first < n; first += at.run, base += at.run_pitch) {
      std::int64_t const gate = base + at.gate_first, up = base + at.up_first;
      if (at.stride == 1) {
        backward_run<1>(act, at.run, score, h + gate, h + up, da + first, dh + gate, dh + up,
                        a + first);
      } else {
        backward_run<2>(act, at.run, score, h + gate, h + up, da + first, dh + gate, dh + up,
                        a + first);
      }
    }
    args.da_dot_a[r] = dot(da, a, n);
    T* const a_scaled = args.a_scaled + r * n;
    for (std::int64_t i = 0; i < n; ++i) a_scaled[i] = round_to<T>(a[i] * score);
  }
}

template <class T>
TESSERA_INLINE void forward_of(MoeDesc const& desc, std::int64_t rows, float const* h,
                               T* a) noexcept {
  HColumns const at = h_columns(desc);
  std::int64_t const n = desc.shape.intermediate;
  visit_activation(desc.activation, [&](auto act) __attribute__((always_inline)) {
    forward_rows(act, at, desc.up_width() * n, n, rows, h, a);
  });
}
template <class T>
TESSERA_INLINE void backward_of(MoeDesc const& desc, ActivationBackward<T> const& args) noexcept {
  HColumns const at = h_columns(desc);
  std::int64_t const n = desc.shape.intermediate;
  visit_activation(desc.activation, [&](auto act) __attribute__((always_inline)) {
    backward_rows(act, at, desc.up_width() * n, n, args);
  });
}

template <class T>
TESSERA_INLINE float dot_of(T const* a, T const* b, std::int64_t count) noexcept {
  constexpr int kLanes = 16;
  float sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      sum[lane] += to_fp32(a[i + lane]) * to_fp32(b[i + lane]);
  }
  for (int lane = 0; i < count; ++i, ++lane) sum[lane] += to_fp32(a[i]) * to_fp32(b[i]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
  }
  return sum[0];
}

}  // namespace

HColumns h_columns(MoeDesc const& desc) noexcept {
  std::int64_t const n = desc.shape.intermediate;
  std::int64_t const width = desc.up_width() * n;
  if (!desc.activation.gated() || desc.layout.orientation == WeightOrientation::separate) {
    return {0, n, 1, n, width};
  }
  switch (desc.layout.order) {
    case GateUpOrder::concat:
      break;
    case GateUpOrder::up_first:
      return {n, 0, 1, n, width};
    case GateUpOrder::interleaved:
      return {0, 1, 2, n, width};
    case GateUpOrder::blocked:
      return {0, desc.layout.block, 1, desc.layout.block, 2 * std::int64_t{desc.layout.block}};
  }
  return {0, n, 1, n, width};
}

TESSERA_SIMD float dot(float const* a, float const* b, std::int64_t count) noexcept {
  return dot_of(a, b, count);
}
TESSERA_SIMD float dot(Bf16 const* a, Bf16 const* b, std::int64_t count) noexcept {
  return dot_of(a, b, count);
}

void round_values(float const* values, std::int64_t count, float* out) noexcept {
  std::copy_n(values, count, out);
}
TESSERA_SIMD void round_values(float const* values, std::int64_t count, Bf16* out) noexcept {
  for (std::int64_t i = 0; i < count; ++i) out[i] = round_to<Bf16>(values[i]);
}

TESSERA_SIMD void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h,
                                     float* a) noexcept {
  forward_of(desc, rows, h, a);
}
TESSERA_SIMD void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h,
                                     Bf16* a) noexcept {
  forward_of(desc, rows, h, a);
}

TESSERA_SIMD void activation_backward(MoeDesc const& desc,
                                      ActivationBackward<float> const& args) noexcept {
  backward_of(desc, args);
}
TESSERA_SIMD void activation_backward(MoeDesc const& desc,
                                      ActivationBackward<Bf16> const& args) noexcept {
  backward_of(desc, args);
}

}  // namespace tessera::cpu
