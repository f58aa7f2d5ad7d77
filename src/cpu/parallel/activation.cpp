// SPDX-License-Identifier: Apache-2.0
// a = act(h) and its backward, row by row; the formulas: core/activation_math.hpp.
#include "cpu/parallel/activation.hpp"

#include "core/activation_math.hpp"
#include "core/simd.hpp"

namespace tessera::cpu {
namespace {

using core::ActivationGradient;
using core::visit_activation;

// One run of a row; kStride is a template value so that the usual stride of 1 is vectorised.
template <std::int64_t kStride, class Act>
TESSERA_INLINE void forward_run(Act act, std::int64_t count, float const* gate, float const* up,
                                float* a) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    float const u = Act::kGated ? up[i * kStride] : 0.0f;
    a[i] = act.forward(gate[i * kStride], u);
  }
}

template <class Act>
TESSERA_INLINE void forward_rows(Act act, HColumns const& at, std::int64_t width, std::int64_t n,
                                 std::int64_t rows, float const* h, float* a) noexcept {
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

template <std::int64_t kStride, class Act>
TESSERA_INLINE void backward_run(Act act, std::int64_t count, float score, float const* gate,
                                 float const* up, float const* da, float* dgate, float* dup,
                                 float* a) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    float const u = Act::kGated ? up[i * kStride] : 0.0f;
    ActivationGradient const gradient = act.backward(gate[i * kStride], u, score * da[i]);
    dgate[i * kStride] = gradient.dg;
    if (Act::kGated) dup[i * kStride] = gradient.du;
    a[i] = gradient.a;
  }
}

template <class Act>
TESSERA_INLINE void backward_rows(Act act, HColumns const& at, std::int64_t width, std::int64_t n,
                                  ActivationBackward const& args) noexcept {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    float const* const h = args.h + r * width;
    float* const dh = args.dh + r * width;
    float const* const da = args.da_unscaled + r * n;
    float* const a = args.a_scaled + r * n;
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
    for (std::int64_t i = 0; i < n; ++i) a[i] *= score;
  }
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
  constexpr int kLanes = 16;
  float sum[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += a[i + lane] * b[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) sum[lane] += a[i] * b[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
  }
  return sum[0];
}

TESSERA_SIMD void activation_forward(MoeDesc const& desc, std::int64_t rows, float const* h,
                                     float* a) noexcept {
  HColumns const at = h_columns(desc);
  std::int64_t const n = desc.shape.intermediate;
  visit_activation(desc.activation, [&](auto act) __attribute__((always_inline)) {
    forward_rows(act, at, desc.up_width() * n, n, rows, h, a);
  });
}

TESSERA_SIMD void activation_backward(MoeDesc const& desc,
                                      ActivationBackward const& args) noexcept {
  HColumns const at = h_columns(desc);
  std::int64_t const n = desc.shape.intermediate;
  visit_activation(desc.activation, [&](auto act) __attribute__((always_inline)) {
    backward_rows(act, at, desc.up_width() * n, n, args);
  });
}

}  // namespace tessera::cpu
