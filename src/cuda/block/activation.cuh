// SPDX-License-Identifier: Apache-2.0
// The activation functions of the fast kernels (definitions: core/activation_math.hpp), a = f(g, u); those
// that are not gated ignore u. Sigmoid and tanh come from one special-function instruction: absolute
// error 2^-12 of phi(g)/g, below the rounding of bf16 except where phi is tiny.
#pragma once

#include "../arch/approx_math.cuh"
#include "tessera/shape.hpp"

namespace tessera::cuda::block {

// x * sigmoid(2v) = x/2 * (1 + tanh v)
__device__ __forceinline__ float times_sigmoid(float x, float v) {
  float const half = 0.5f * x;
  return fmaf(half, arch::tanh_approx(v), half);
}

__device__ __forceinline__ float silu(float x) { return times_sigmoid(x, 0.5f * x); }

__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kScale = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2/pi)
  return times_sigmoid(x, kScale * fmaf(kCubic * x * x, x, x));
}

// x/2 * erfc(-x/sqrt(2)); erfc(|z|) = (a1 t + .. + a5 t^5) exp(-z^2), t = 1/(1 + p|z|), absolute error
// 1.5e-7 (Abramowitz and Stegun, 7.1.26).
__device__ __forceinline__ float gelu_erf(float x) {
  constexpr float kHalfLog2e = 0.7213475204444817f;  // exp(-x^2/2) = 2^(-x^2 * log2(e)/2)
  float const t = arch::rcp_approx(fmaf(0.3275911f * 0.7071067811865476f, fabsf(x), 1.0f));
  float poly = fmaf(1.061405429f, t, -1.453152027f);
  poly = fmaf(poly, t, 1.421413741f);
  poly = fmaf(poly, t, -0.284496736f);
  poly = fmaf(poly, t, 0.254829592f);
  float const tail = 0.5f * poly * t * arch::exp2_approx(-kHalfLog2e * x * x);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// A comparison that keeps NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

template <ActivationKind kKind>
struct ActivationFunction {
  static constexpr bool kGated = Activation{.kind = kKind}.gated();

  __device__ __forceinline__ static float forward(Activation const& act, float g, float u) {
    if constexpr (kKind == ActivationKind::swiglu) {
      return silu(g) * u;
    } else if constexpr (kKind == ActivationKind::geglu) {
      return gelu_tanh(g) * u;
    } else if constexpr (kKind == ActivationKind::geglu_erf) {
      return gelu_erf(g) * u;
    } else if constexpr (kKind == ActivationKind::reglu) {
      return relu(g) * u;
    } else if constexpr (kKind == ActivationKind::clamped_swiglu) {
      float const gc = g > act.limit ? act.limit : g;
      float const uc = u > act.limit ? act.limit : (u < -act.limit ? -act.limit : u);
      return (uc + act.up_offset) * times_sigmoid(gc, 0.5f * act.alpha * gc);
    } else if constexpr (kKind == ActivationKind::relu) {
      return relu(g);
    } else if constexpr (kKind == ActivationKind::relu2) {
      return relu(g) * relu(g);
    } else if constexpr (kKind == ActivationKind::silu) {
      return silu(g);
    } else if constexpr (kKind == ActivationKind::gelu) {
      return gelu_tanh(g);
    } else {
      static_assert(kKind == ActivationKind::gelu_erf);
      return gelu_erf(g);
    }
  }
};

}  // namespace tessera::cuda::block
