// SPDX-License-Identifier: Apache-2.0
// Gated:     a = phi(g)*u,  dg = da*u*phi'(g),  du = da*phi(g)
// Not gated: a = phi(g),    dg = da*phi'(g)
#include "cpu/parallel/activation.hpp"

#include <cmath>

#include "core/fp32_math.hpp"
#include "core/simd.hpp"

namespace tessera::cpu {
namespace {

using core::exp_fp32;
using core::sigmoid_pair_fp32;

struct Value {
  float phi, slope;  // phi(x), phi'(x)
};

struct Silu {
  TESSERA_INLINE Value operator()(float x) const noexcept {
    auto const [sig, rest] = sigmoid_pair_fp32(x);
    return {x * sig, sig * (1.0f + x * rest)};
  }
};
// x/2*(1 + tanh v) = x*sigmoid(2v), which keeps its relative accuracy for x << 0.
struct GeluTanh {
  TESSERA_INLINE Value operator()(float x) const noexcept {
    constexpr float kScale = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2/pi)
    float const inner = kScale * (x + kCubic * x * x * x);
    auto const [sig, rest] = sigmoid_pair_fp32(2.0f * inner);
    float const slope_inner = kScale * (1.0f + 3.0f * kCubic * x * x);
    return {x * sig, sig + 2.0f * x * sig * rest * slope_inner};
  }
};
struct GeluErf {
  TESSERA_INLINE Value operator()(float x) const noexcept {
    constexpr float kInvSqrt2 = 0.7071067811865476f, kInvSqrt2Pi = 0.3989422804014327f;
    float const cdf = 0.5f * std::erfc(-x * kInvSqrt2);
    return {x * cdf, cdf + x * kInvSqrt2Pi * exp_fp32(-0.5f * x * x)};
  }
};
// Comparisons are written so that NaN stays NaN; the slope at 0 is 0.
struct Relu {
  TESSERA_INLINE Value operator()(float x) const noexcept {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  }
};
struct Relu2 {
  TESSERA_INLINE Value operator()(float x) const noexcept {
    float const positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
  }
};

struct Gradient {
  float a, dg, du;
};

template <class Phi>
struct Gated {
  static constexpr bool kGated = true;
  TESSERA_INLINE float forward(float g, float u) const noexcept { return Phi{}(g).phi * u; }
  TESSERA_INLINE Gradient backward(float g, float u, float da) const noexcept {
    Value const value = Phi{}(g);
    return {value.phi * u, da * u * value.slope, da * value.phi};
  }
};
template <class Phi>
struct Plain {
  static constexpr bool kGated = false;
  TESSERA_INLINE float forward(float g, float) const noexcept { return Phi{}(g).phi; }
  TESSERA_INLINE Gradient backward(float g, float, float da) const noexcept {
    Value const value = Phi{}(g);
    return {value.phi, da * value.slope, 0.0f};
  }
};
// gc = min(g,L), uc = clamp(u,-L,L), v = sigmoid(alpha*gc): a = (uc+k)*gc*v.
struct ClampedSwiglu {
  static constexpr bool kGated = true;
  float alpha, limit, up_offset;
  TESSERA_INLINE float forward(float g, float u) const noexcept { return backward(g, u, 0.0f).a; }
  TESSERA_INLINE Gradient backward(float g, float u, float da) const noexcept {
    float const gc = g > limit ? limit : g;
    float const uc = u > limit ? limit : (u < -limit ? -limit : u);
    auto const [v, rest] = sigmoid_pair_fp32(alpha * gc);
    float const silu = gc * v;
    float const dg = da * (uc + up_offset) * v * (1.0f + alpha * gc * rest);
    float const du = da * silu;
    return {(uc + up_offset) * silu, g > limit ? 0.0f : dg, u > limit || u < -limit ? 0.0f : du};
  }
};

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
    Gradient const gradient = act.backward(gate[i * kStride], u, score * da[i]);
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

/// Calls visit(functor) with the functor of the activation.
template <class Visit>
TESSERA_INLINE void visit_activation(Activation const& act, Visit&& visit) noexcept {
  switch (act.kind) {
    case ActivationKind::swiglu:
      return visit(Gated<Silu>{});
    case ActivationKind::geglu:
      return visit(Gated<GeluTanh>{});
    case ActivationKind::geglu_erf:
      return visit(Gated<GeluErf>{});
    case ActivationKind::reglu:
      return visit(Gated<Relu>{});
    case ActivationKind::clamped_swiglu:
      return visit(ClampedSwiglu{act.alpha, act.limit, act.up_offset});
    case ActivationKind::relu:
      return visit(Plain<Relu>{});
    case ActivationKind::relu2:
      return visit(Plain<Relu2>{});
    case ActivationKind::silu:
      return visit(Plain<Silu>{});
    case ActivationKind::gelu:
      return visit(Plain<GeluTanh>{});
    case ActivationKind::gelu_erf:
      return visit(Plain<GeluErf>{});
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
