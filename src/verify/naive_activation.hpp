// SPDX-License-Identifier: Apache-2.0
// Activations as a textbook states them, in fp32 (formulas: src/cpu/reference/activation.cpp).
#pragma once

#include <cmath>
#include <numbers>

#include "tessera/shape.hpp"
#include "verify/naive_rounding.hpp"

namespace tessera::verify {

struct NaivePhi {
  float value, slope;
};

inline float naive_sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

inline NaivePhi naive_phi(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::swiglu:
    case ActivationKind::silu: {
      float const s = naive_sigmoid(x);
      return {x * s, s * (1 + x * (1 - s))};
    }
    case ActivationKind::geglu:
    case ActivationKind::gelu: {
      float const y = 0.79788456f, z = 0.044715f;
      float const th = std::tanh(y * (x + z * x * x * x));
      return {0.5f * x * (1 + th),
              0.5f * (1 + th) + 0.5f * x * (1 - th * th) * y * (1 + 3 * z * x * x)};
    }
    case ActivationKind::geglu_erf:
    case ActivationKind::gelu_erf: {
      float const cdf = 0.5f * (1 + std::erf(x * 0.70710678f));
      float const pdf = 0.39894228f * std::exp(-0.5f * x * x);
      return {x * cdf, cdf + x * pdf};
    }
    case ActivationKind::reglu:
    case ActivationKind::relu:
      return {x < 0 ? 0 : x, x > 0 ? 1.0f : 0.0f};
    case ActivationKind::relu2:
      return {x < 0 ? 0 : x * x, x < 0 ? 0 : 2 * x};
    case ActivationKind::clamped_swiglu:
      break;
  }
  return {0, 0};
}

/// a from (gate, up), phi and a each rounded.
inline float naive_activate(Activation const& act, NaiveRounding& rounded, float gate, float up) {
  if (act.kind == ActivationKind::clamped_swiglu) {
    float const gc = gate > act.limit ? act.limit : gate;
    float const uc = up > act.limit ? act.limit : up < -act.limit ? -act.limit : up;
    float const silu = rounded(gc * naive_sigmoid(act.alpha * gc));
    return rounded((uc + act.up_offset) * silu);
  }
  if (!act.gated()) return rounded(naive_phi(act.kind, up).value);
  return rounded(rounded(naive_phi(act.kind, gate).value) * up);
}

struct NaiveGradient {
  float gate, up;
};
inline NaiveGradient naive_gradient(Activation const& act, NaiveRounding& rounded, float gate,
                                    float up, float da) {
  if (act.kind == ActivationKind::clamped_swiglu) {
    float const gc = gate > act.limit ? act.limit : gate;
    float const uc = up > act.limit ? act.limit : up < -act.limit ? -act.limit : up;
    float const v = naive_sigmoid(act.alpha * gc);
    float const dgate =
        gate > act.limit ? 0 : da * (uc + act.up_offset) * v * (1 + act.alpha * gc * (1 - v));
    float const dup = up > act.limit || up < -act.limit ? 0 : da * gc * v;
    return {rounded(dgate), rounded(dup)};
  }
  if (!act.gated()) return {0, rounded(da * naive_phi(act.kind, up).slope)};
  NaivePhi const phi = naive_phi(act.kind, gate);
  return {rounded(da * up * phi.slope), rounded(da * phi.value)};
}

}  // namespace tessera::verify
