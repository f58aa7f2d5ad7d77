// SPDX-License-Identifier: Apache-2.0
// Gated A = phi(g)*u: dg = dA*u*phi'(g), du = dA*phi(g). Not gated A = phi(h): dh = dA*phi'(h).
// clamped_swiglu(alpha, L, k): gc = min(g,L), uc = clamp(u,-L,L), v = sigmoid(alpha*gc), A = (uc+k)*gc*v.
#include "cpu/reference/activation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace tessera::reference {
namespace {

struct Phi {
  double value, slope;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Phi silu(double x) {
  double const s = sigmoid(x);
  return {x * s, s * (1 + x * (1 - s))};
}

// (1 + tanh v)/2 = sigmoid(2v), which cancels nowhere.
Phi gelu_tanh(double x) {
  double const y = std::sqrt(2 / std::numbers::pi), z = 0.044715;
  double const v = y * (x + z * x * x * x);
  double const s = sigmoid(2 * v), rest = sigmoid(-2 * v);
  return {x * s, s + 2 * x * (s * rest) * y * (1 + 3 * z * x * x)};
}

Phi gelu_erf(double x) {
  double const cdf = 0.5 * std::erfc(-x / std::numbers::sqrt2);
  double const pdf = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
  return {x * cdf, cdf + x * pdf};
}

Phi phi(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::swiglu:
    case ActivationKind::silu:
      return silu(x);
    case ActivationKind::geglu:
    case ActivationKind::gelu:
      return gelu_tanh(x);
    case ActivationKind::geglu_erf:
    case ActivationKind::gelu_erf:
      return gelu_erf(x);
    case ActivationKind::reglu:
    case ActivationKind::relu:
      return {x < 0 ? 0 : x, x > 0 ? 1.0 : 0.0};
    case ActivationKind::relu2:
      return {x < 0 ? 0 : x * x, x < 0 ? 0 : 2 * x};
    case ActivationKind::clamped_swiglu:
      break;
  }
  return {0, 0};
}

struct Clamped {
  double gate, up, v;
};
Clamped clamped(Activation const& act, double gate, double up) {
  double const limit = act.limit;
  double const gc = gate > limit ? limit : gate;
  double const uc = up > limit ? limit : up < -limit ? -limit : up;
  return {gc, uc, sigmoid(act.alpha * gc)};
}

}  // namespace

double activate(Activation const& act, double gate, double up) {
  if (act.kind == ActivationKind::clamped_swiglu) {
    auto const [gc, uc, v] = clamped(act, gate, up);
    return (uc + act.up_offset) * gc * v;
  }
  return act.gated() ? phi(act.kind, gate).value * up : phi(act.kind, up).value;
}

ActivationGradient activation_gradient(Activation const& act, double gate, double up, double da) {
  if (act.kind == ActivationKind::clamped_swiglu) {
    auto const [gc, uc, v] = clamped(act, gate, up);
    bool const gate_passes = !(gate > act.limit);
    bool const up_passes = !(up > act.limit || up < -act.limit);
    return {gate_passes ? da * (uc + act.up_offset) * v * (1 + act.alpha * gc * (1 - v)) : 0,
            up_passes ? da * gc * v : 0};
  }
  if (!act.gated()) return {0, da * phi(act.kind, up).slope};
  Phi const p = phi(act.kind, gate);
  return {da * up * p.slope, da * p.value};
}

double distance_to_kink(Activation const& act, double gate, double up) {
  switch (act.kind) {
    case ActivationKind::reglu:
      return std::abs(gate);
    case ActivationKind::relu:
      return std::abs(up);
    case ActivationKind::clamped_swiglu:
      return std::min(std::abs(gate - act.limit), std::abs(std::abs(up) - act.limit));
    default:
      return std::numeric_limits<double>::infinity();
  }
}

}  // namespace tessera::reference
