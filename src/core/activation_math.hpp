// SPDX-License-Identifier: Apache-2.0
// The activation functions, as CPU and GPU compute them:
// Gated:     a = phi(g)*u,  dg = da*u*phi'(g),  du = da*phi(g)
// Not gated: a = phi(g),    dg = da*phi'(g)
//
// Products stand in an order in which nothing overflows before a factor that is 0: a sigmoid, or its distance from 1,
// is multiplied first, as inf * 0 would be NaN. tests/cpu/activation_walk.hpp goes through all magnitudes.
#pragma once

#include <cmath>

#include "core/fp32_math.hpp"
#include "core/simd.hpp"
#include "tessera/shape.hpp"

namespace tessera::core {

struct ActivationValue {
  float phi, slope;  // phi(x), phi'(x)
};

struct Silu {
  TESSERA_INLINE ActivationValue operator()(float x) const noexcept {
    auto const [sig, rest] = sigmoid_pair_fp32(x);
    return {x * sig, sig * (1.0f + x * rest)};
  }
};
// x/2*(1 + tanh v) = x*sigmoid(2v), which keeps its relative accuracy for x << 0.
struct GeluTanh {
  TESSERA_INLINE ActivationValue operator()(float x) const noexcept {
    constexpr float kScale = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2/pi)
    float const inner = kScale * (x + kCubic * x * x * x);
    auto const [sig, rest] = sigmoid_pair_fp32(2.0f * inner);
    // 2x sig rest * inner', inner' = kScale * (1 + 3 kCubic x^2)
    float const part = 2.0f * kScale * (x * sig * rest);
    return {x * sig, sig + (part + 3.0f * kCubic * part * x * x)};
  }
};
struct GeluErf {
  TESSERA_INLINE ActivationValue operator()(float x) const noexcept {
    constexpr float kInvSqrt2 = 0.7071067811865476f, kInvSqrt2Pi = 0.3989422804014327f;
    float const cdf = 0.5f * std::erfc(-x * kInvSqrt2);
    return {x * cdf, cdf + x * kInvSqrt2Pi * exp_fp32(-0.5f * x * x)};
  }
};
// Comparisons are written so that NaN stays NaN; the slope at 0 is 0.
struct Relu {
  TESSERA_INLINE ActivationValue operator()(float x) const noexcept {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  }
};

struct ActivationGradient {
  float a, dg, du;
};

template <class Phi>
struct Gated {
  static constexpr bool kGated = true;
  TESSERA_INLINE float forward(float g, float u) const noexcept { return Phi{}(g).phi * u; }
  TESSERA_INLINE ActivationGradient backward(float g, float u, float da) const noexcept {
    ActivationValue const value = Phi{}(g);
    return {value.phi * u, da * value.slope * u, da * value.phi};
  }
};
template <class Phi>
struct Plain {
  static constexpr bool kGated = false;
  TESSERA_INLINE float forward(float g, float) const noexcept { return Phi{}(g).phi; }
  TESSERA_INLINE ActivationGradient backward(float g, float, float da) const noexcept {
    ActivationValue const value = Phi{}(g);
    return {value.phi, da * value.slope, 0.0f};
  }
};
// Its slope 2x may overflow, da * x in its place only with the gradient.
struct Relu2 {
  static constexpr bool kGated = false;
  TESSERA_INLINE float forward(float g, float) const noexcept {
    float const positive = Relu{}(g).phi;
    return positive * positive;
  }
  TESSERA_INLINE ActivationGradient backward(float g, float, float da) const noexcept {
    float const positive = Relu{}(g).phi;
    return {positive * positive, 2.0f * (da * positive), 0.0f};
  }
};
// gc = min(g,L), uc = clamp(u,-L,L), v = sigmoid(alpha*gc): a = (uc+k)*gc*v.
struct ClampedSwiglu {
  static constexpr bool kGated = true;
  float alpha, limit, up_offset;
  TESSERA_INLINE float forward(float g, float u) const noexcept { return backward(g, u, 0.0f).a; }
  TESSERA_INLINE ActivationGradient backward(float g, float u, float da) const noexcept {
    float const gc = g > limit ? limit : g;
    float const uc = u > limit ? limit : (u < -limit ? -limit : u);
    auto const [v, rest] = sigmoid_pair_fp32(alpha * gc);
    float const silu = gc * v;
    float const dg = da * (v + alpha * (v * rest) * gc) * (uc + up_offset);
    float const du = da * silu;
    return {(uc + up_offset) * silu, g > limit ? 0.0f : dg, u > limit || u < -limit ? 0.0f : du};
  }
};

/// Calls visit(functor) with the functor of the activation.
template <class Visit>
inline __attribute__((always_inline)) void visit_activation(Activation const& act,
                                                            Visit&& visit) noexcept {
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
      return visit(Relu2{});
    case ActivationKind::silu:
      return visit(Plain<Silu>{});
    case ActivationKind::gelu:
      return visit(Plain<GeluTanh>{});
    case ActivationKind::gelu_erf:
      return visit(Plain<GeluErf>{});
  }
}

}  // namespace tessera::core
