// SPDX-License-Identifier: Apache-2.0
// The activation functions of the fast kernels and their gradients (definitions: core/activation_math.hpp),
// a = f(g, u); those that are not gated ignore u. Sigmoid and tanh come from one special-function
// instruction: absolute error 2^-12 of phi(g)/g, below the rounding of bf16 except where phi is tiny
// (docs/numerics.md, Activations).
//
// Products stand in an order in which nothing overflows before a factor that is 0: inf * 0 would be NaN.
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/warp.cuh"
#include "tessera/shape.hpp"

namespace tessera::cuda::gemm {

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

// Phi(x) = erfc(-x/sqrt(2))/2; erfc(|z|) = (a1 t + .. + a5 t^5) exp(-z^2), t = 1/(1 + p|z|), absolute error
// 1.5e-7 (Abramowitz and Stegun, 7.1.26). gauss: exp(-x^2/2).
__device__ __forceinline__ float normal_cdf(float x, float gauss) {
  float const t = arch::rcp_approx(fmaf(0.3275911f * 0.7071067811865476f, fabsf(x), 1.0f));
  float poly = fmaf(1.061405429f, t, -1.453152027f);
  poly = fmaf(poly, t, 1.421413741f);
  poly = fmaf(poly, t, -0.284496736f);
  poly = fmaf(poly, t, 0.254829592f);
  float const tail = 0.5f * poly * t * gauss;
  return x < 0.0f ? tail : 1.0f - tail;
}

__device__ __forceinline__ float gauss(float x) {
  constexpr float kHalfLog2e = 0.7213475204444817f;  // exp(-x^2/2) = 2^(-x^2 * log2(e)/2)
  return arch::exp2_approx(-kHalfLog2e * x * x);
}

__device__ __forceinline__ float gelu_erf(float x) { return x * normal_cdf(x, gauss(x)); }

// A comparison that keeps NaN.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

// phi(x) and phi'(x).
struct ActivationValue {
  float phi, slope;
};

// x * sigmoid(alpha * x)
__device__ __forceinline__ ActivationValue silu_value(float x, float alpha) {
  float const sigmoid = fmaf(0.5f, arch::tanh_approx(0.5f * alpha * x), 0.5f);
  float const phi = x * sigmoid;
  return {phi, fmaf(alpha * (1.0f - sigmoid), phi, sigmoid)};
}

__device__ __forceinline__ ActivationValue gelu_tanh_value(float x) {
  constexpr float kScale = 0.7978845608028654f, kCubic = 0.044715f;  // sqrt(2/pi)
  float const square = x * x;
  float const th = arch::tanh_approx(kScale * fmaf(kCubic * square, x, x));
  float const half = fmaf(0.5f, th, 0.5f);
  // half + x/2 (1 - th^2) kScale (1 + 3 kCubic x^2), where 1 - th^2 = 0 before x^2 overflows
  float const part = x * fmaf(-th, th, 1.0f);
  float const slope = fmaf(0.5f * kScale, part, half);
  return {x * half, fmaf(part * x, 1.5f * kScale * kCubic * x, slope)};
}

__device__ __forceinline__ ActivationValue gelu_erf_value(float x) {
  constexpr float kInvSqrt2Pi = 0.3989422804014327f;
  float const g = gauss(x);
  float const cdf = normal_cdf(x, g);
  return {x * cdf, fmaf(kInvSqrt2Pi * x, g, cdf)};
}

struct ActivationGradient {
  float a, dg, du;
};

template <ActivationKind kKind>
struct ActivationFunction {
  static constexpr bool kGated = Activation{.kind = kKind}.gated();

  // a, and the gradients for da.
  __device__ __forceinline__ static ActivationGradient backward(Activation const& act, float g,
                                                                float u, float da) {
    if constexpr (kKind == ActivationKind::clamped_swiglu) {
      float const gc = g > act.limit ? act.limit : g;
      float const uc = u > act.limit ? act.limit : (u < -act.limit ? -act.limit : u);
      auto const [phi, slope] = silu_value(gc, act.alpha);
      float const up = uc + act.up_offset;
      return {up * phi, da * (g > act.limit ? 0.0f : slope) * up,
              u > act.limit || u < -act.limit ? 0.0f : da * phi};
    } else if constexpr (kKind == ActivationKind::relu2) {
      float const positive = relu(g);
      float const half = da * positive;  // the slope 2g may overflow
      return {positive * positive, half + half, 0.0f};
    } else {
      auto const [phi, slope] = value(g);
      if constexpr (kGated) {
        return {phi * u, da * slope * u, da * phi};
      } else {
        return {phi, da * slope, 0.0f};
      }
    }
  }

  // The score of a row whose gates and ups are codes times a scale each, and factors that contain the scales.
  struct Factors {
    float score, half_gate, half_up, score_up;
  };
  __device__ __forceinline__ static Factors factors(float score, float gate_scale, float up_scale) {
    return {.score = score,
            .half_gate = 0.5f * gate_scale,
            .half_up = __uint_as_float(arch::forgotten(__float_as_uint(0.5f * up_scale))),
            .score_up = score * up_scale};
  }
  // Returns a / up_scale, and the gradients for score * da, of codes g and u: scales are multiplied where a factor
  // stands anyway.
  __device__ __forceinline__ static ActivationGradient backward_of_codes(Factors const& f, float g,
                                                                         float u, float da) {
    static_assert(kKind == ActivationKind::swiglu);
    float const half = f.half_gate * g, th = arch::tanh_approx(half);
    float const phi = fmaf(half, th, half);
    float const up_sigmoid = fmaf(f.half_up, th, f.half_up);
    float const up_slope = fmaf(phi, fmaf(-f.half_up, th, f.half_up), up_sigmoid);
    float const scored = f.score * da;
    return {phi * u, scored * up_slope * u, scored * phi};
  }

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

 private:
  __device__ __forceinline__ static ActivationValue value(float x) {
    if constexpr (kKind == ActivationKind::swiglu || kKind == ActivationKind::silu) {
      return silu_value(x, 1.0f);
    } else if constexpr (kKind == ActivationKind::geglu || kKind == ActivationKind::gelu) {
      return gelu_tanh_value(x);
    } else if constexpr (kKind == ActivationKind::geglu_erf || kKind == ActivationKind::gelu_erf) {
      return gelu_erf_value(x);
    } else {
      static_assert(kKind == ActivationKind::reglu || kKind == ActivationKind::relu);
      return {relu(x), x > 0.0f ? 1.0f : 0.0f};
    }
  }
};

}  // namespace tessera::cuda::gemm
