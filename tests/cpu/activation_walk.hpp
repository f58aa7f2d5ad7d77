// SPDX-License-Identifier: Apache-2.0
// Every activation and its derivatives at every magnitude: gates of all bf16 exponents and both signs, 0, subnormals
// and infinities, with up values and incoming gradients from 0 to the largest. Each backend answers a list of points;
// the answers are compared with the formulas in long double, whose exponents reach far enough for every intermediate.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::activation_walk {

struct Point {
  float g, u, da;
};
/// What a backend computes: a by the forward pass; a, dg and du by the backward pass.
struct Answer {
  double forward, a, dg, du;
};

/// How far a backend may be off. `share` is phi(x)/x: the sigmoid, or the distribution function of the normal.
struct Bounds {
  double relative;      // of each product and sum
  double share;         // absolute error of a share, no more than its distance from 0 or 1 ..
  double coarse_until;  // .. but where the sigmoid's argument is below this, whatever the distance
};
constexpr Bounds kReferenceBounds{0x1p-49, DBL_MIN, 0};
constexpr Bounds kCpuBounds{0x1p-21, FLT_MIN, 0};
/// tanh.approx has a relative error of 2^-11, the sigmoid made of it half of that. Beyond +-10 tanh is +-1 in fp32.
constexpr Bounds kCudaBounds{0x1p-20, 0x1p-12, 20};
/// The erf forms have a polynomial instead.
constexpr Bounds kCudaErfBounds{0x1p-20, 0x1p-22, 0};

inline Bounds const& cuda_bounds(ActivationKind kind) {
  bool const is_erf = kind == ActivationKind::geglu_erf || kind == ActivationKind::gelu_erf;
  return is_erf ? kCudaErfBounds : kCudaBounds;
}

inline float from_bf16(std::uint32_t bits) {
  std::uint32_t const wide = bits << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargestBf16 = 0x1.fep127f;

/// Each finite bf16 value, +-0 and subnormals included.
inline std::vector<float> all_finite() {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (std::isfinite(from_bf16(bits))) values.push_back(from_bf16(bits));
  }
  return values;
}

/// Each exponent and sign with five mantissas.
inline std::vector<float> all_exponents() {
  std::vector<float> values;
  for (float const value : all_finite()) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    std::uint32_t const mantissa = bits >> 16 & 0x7f;
    if (mantissa == 0 || mantissa == 1 || mantissa == 0x2a || mantissa == 0x40 ||
        mantissa == 0x7f) {
      values.push_back(value);
    }
  }
  return values;
}

/// The incoming gradient stays below 2^127 where it is not 1: it is an fp32 sum, and the 13 % by which a slope
/// may exceed 1 must not make it overflow.
inline std::vector<Point> points() {
  std::vector<Point> result;
  for (float const g : all_finite()) result.push_back({g, 1.0f, 1.0f});
  constexpr float kUps[] = {0.0f,       -0.0f,    1.0f,         -3.0f,        0x1p-133f,
                            0x1.8p-60f, 0x1p100f, kLargestBf16, -kLargestBf16};
  constexpr float kGradients[] = {0.0f, -1.0f, 0x1p-140f, 0x1p-70f, -0x1.4p70f, 0x1.fp126f};
  for (float const g : all_exponents()) {
    for (float const u : kUps) {
      for (float const da : kGradients) result.push_back({g, u, da});
    }
  }
  for (float const u : all_exponents()) {
    for (float const g : {-2.0f, 3.0f}) result.push_back({g, u, -1.5f});
  }
  return result;
}

/// Every kind, clamped-swiglu with parameters at the ends of what is accepted.
inline std::vector<Activation> activations() {
  std::vector<Activation> result;
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::gelu_erf); ++kind) {
    result.push_back({.kind = static_cast<ActivationKind>(kind)});
  }
  for (float const alpha : {0.0f, 1.0f, -1.702f, 1.702f, 1e-38f, 3e38f}) {
    for (float const limit : {1e-30f, 3e38f, kInfinity}) {
      result.push_back(
          {ActivationKind::clamped_swiglu, alpha, limit, alpha == 0.0f ? -1e30f : 0.0f});
    }
  }
  return result;
}

struct Exact {
  long double share, tail;  // phi(x)/x, and its distance from 0 or 1
  long double argument;     // of the sigmoid; of the exponential
  long double phi, slope;
  long double slope_terms;  // sum of the magnitudes of the slope's terms
  long double sensitivity;  // |d slope / d share|
};

inline long double sigmoid(long double x) { return 1 / (1 + std::exp(-x)); }

inline Exact of_sigmoid(long double x, long double v, long double x_dv) {
  long double const s = sigmoid(v), rest = sigmoid(-v);
  long double const second = x_dv * (s * rest);
  return {s,          std::min(s, rest),    std::abs(v),       x * s,
          s + second, s + std::abs(second), 1 + std::abs(x_dv)};
}

inline Exact exact_phi(ActivationKind kind, long double x, long double alpha) {
  constexpr long double kPi = 3.14159265358979323846264338327950288L;
  switch (kind) {
    case ActivationKind::swiglu:
    case ActivationKind::silu:
    case ActivationKind::clamped_swiglu:
      return of_sigmoid(x, alpha * x, alpha * x);
    case ActivationKind::geglu:
    case ActivationKind::gelu: {
      long double const q = std::sqrt(2 / kPi), z = 0.044715L;
      return of_sigmoid(x, 2 * q * (x + z * x * x * x), 2 * x * q * (1 + 3 * z * x * x));
    }
    case ActivationKind::geglu_erf:
    case ActivationKind::gelu_erf: {
      long double const cdf = std::erfc(-x / std::sqrt(2.0L)) / 2;
      long double const second = x * (std::exp(-x * x / 2) / std::sqrt(2 * kPi));
      long double const tail = std::erfc(std::abs(x) / std::sqrt(2.0L)) / 2;
      return {cdf, tail, x * x / 2, x * cdf, cdf + second, cdf + std::abs(second), 1 + x * x};
    }
    case ActivationKind::reglu:
    case ActivationKind::relu:
      return {0, 0, 0, x < 0 ? 0 : x, x > 0 ? 1.0L : 0.0L, 1, 0};
    case ActivationKind::relu2:
      break;
  }
  return {0, 0, 0, x < 0 ? 0 : x * x, x < 0 ? 0 : 2 * x, 2 * std::abs(x), 0};
}

/// What is expected of one value, and how far from it the backend may be.
struct Expected {
  long double value, tolerance;
  /// Values beyond the largest fp32 are infinite, those near it may be.
  [[nodiscard]] bool admits(double got) const {
    static constexpr long double kMax = FLT_MAX;
    if (std::isnan(got)) return false;
    auto const bounded = [](long double v) { return std::max(-kMax, std::min(kMax, v)); };
    return std::abs(bounded(got) - bounded(value)) <= tolerance;
  }
};

struct ExpectedAnswer {
  Expected a, dg, du;
};

inline float gate_of(Activation const& act, float g) {
  return act.kind == ActivationKind::clamped_swiglu && g > act.limit ? act.limit : g;
}

/// `phi` is exact_phi of the point's gate_of.
inline ExpectedAnswer expected(Activation const& act, Bounds const& bounds, Exact const& phi,
                               Point const& p) {
  using Real = long double;
  bool const is_clamped = act.kind == ActivationKind::clamped_swiglu;
  Real const limit = act.limit;
  Real up = act.gated() ? Real{p.u} : 1;
  if (is_clamped) up = (up > limit ? limit : up < -limit ? -limit : up) + Real{act.up_offset};
  Real const da = p.da;
  // In the tail the rounded argument of the exponential decides: one part in 2^24 of it.
  Real const scale = bounds.relative * (1 + std::min(phi.argument, Real{200}));
  Real const share_error = phi.argument < bounds.coarse_until
                               ? Real{bounds.share}
                               : std::min(phi.tail, Real{bounds.share});
  Real const phi_error =
      scale * std::abs(phi.phi) + share_error * std::abs(Real{gate_of(act, p.g)});
  Real const slope_error = scale * phi.slope_terms + share_error * phi.sensitivity;
  constexpr Real kTiny = 0x1p-147L;  // a subnormal's last bits
  bool const passes_g = !is_clamped || !(p.g > limit);
  bool const passes_u = act.gated() && (!is_clamped || (p.u <= limit && p.u >= -limit));
  auto const product = [&](Real factor, Real error, Real by, Real steps) {
    return Expected{factor * by, error * std::abs(by) + bounds.relative * std::abs(factor * by) +
                                     kTiny * (1 + steps)};
  };
  ExpectedAnswer result{product(phi.phi, phi_error, up, std::abs(up)),
                        product(phi.slope, slope_error, da * up, std::abs(up)),
                        product(phi.phi, phi_error, da, std::abs(da))};
  if (!passes_g) result.dg = {0, 0};
  if (!passes_u) result.du = {0, 0};
  return result;
}

/// A value that a backend has wrong, as text; empty where all answers are right.
inline std::string first_fault(Activation const& act, Bounds const& bounds,
                               std::vector<Point> const& points,
                               std::vector<Answer> const& answers) {
  if (points.size() != answers.size()) return "not as many answers as points";
  Exact phi{};
  for (std::size_t i = 0; i < points.size(); ++i) {
    Point const& p = points[i];
    if (i == 0 || p.g != points[i - 1].g) {
      bool const is_clamped = act.kind == ActivationKind::clamped_swiglu;
      phi = exact_phi(act.kind, gate_of(act, p.g), is_clamped ? act.alpha : 1.0f);
    }
    Answer const& got = answers[i];
    ExpectedAnswer const right = expected(act, bounds, phi, p);
    struct {
      char const* name;
      double got;
      Expected right;
    } const values[] = {{"a (forward)", got.forward, right.a},
                        {"a", got.a, right.a},
                        {"dg", got.dg, right.dg},
                        {"du", act.gated() ? got.du : 0, right.du}};
    for (auto const& value : values) {
      if (value.right.admits(value.got)) continue;
      char text[256];
      std::snprintf(text, sizeof(text),
                    "kind %d alpha %g limit %g offset %g: %s of g %.9g, u %.9g, da %.9g is %.9g, "
                    "not %.9Lg +- %.3Lg",
                    static_cast<int>(act.kind), static_cast<double>(act.alpha),
                    static_cast<double>(act.limit), static_cast<double>(act.up_offset), value.name,
                    static_cast<double>(p.g), static_cast<double>(p.u), static_cast<double>(p.da),
                    value.got, value.right.value, value.right.tolerance);
      return text;
    }
  }
  return {};
}

/// What infinite gate and up values, and NaN, give (docs/numerics.md): a, dg and du for u = da = 1, NaN where it is
/// NaN.
struct InfiniteCase {
  Activation activation;
  Point point;
  double a, dg, du;
};
inline std::vector<InfiniteCase> infinite_cases() {
  using Kind = ActivationKind;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = kInfinity;
  std::vector<InfiniteCase> result;
  for (Kind const kind :
       {Kind::swiglu, Kind::geglu, Kind::geglu_erf, Kind::silu, Kind::gelu, Kind::gelu_erf}) {
    double const du = Activation{.kind = kind}.gated() ? 1 : 0;
    result.push_back({{.kind = kind}, {kInfinity, 1, 1}, kInf, kNan, du * kInf});
    result.push_back({{.kind = kind}, {-kInfinity, 1, 1}, kNan, kNan, du * kNan});
  }
  for (Kind const kind : {Kind::reglu, Kind::relu}) {
    double const du = kind == Kind::reglu ? 1 : 0;
    result.push_back({{.kind = kind}, {kInfinity, 1, 1}, kInf, 1, du * kInf});
    result.push_back({{.kind = kind}, {-kInfinity, 1, 1}, 0, 0, 0});
  }
  result.push_back({{.kind = Kind::relu2}, {kInfinity, 1, 1}, kInf, kInf, 0});
  result.push_back({{.kind = Kind::relu2}, {-kInfinity, 1, 1}, 0, 0, 0});
  for (int i = 0; i <= static_cast<int>(Kind::gelu_erf); ++i) {
    Activation const act{.kind = static_cast<Kind>(i)};
    bool const is_step = act.kind == Kind::reglu || act.kind == Kind::relu;
    result.push_back({act, {std::nanf(""), 1, 1}, kNan, is_step ? 0 : kNan, kNan});
  }
  // As at the bounds, without the gradient of what is clamped.
  Activation const clamped{
      .kind = Kind::clamped_swiglu, .alpha = 100.0f, .limit = 2.0f, .up_offset = 1.0f};
  result.push_back({clamped, {kInfinity, 1, 1}, 4, 0, 2});
  result.push_back({clamped, {-kInfinity, 1, 1}, kNan, kNan, kNan});
  result.push_back({clamped, {2, kInfinity, 1}, 6, 3, 0});
  result.push_back({clamped, {2, -kInfinity, 1}, -2, -1, 0});
  return result;
}
inline std::string fault_at_infinity(InfiniteCase const& c, Answer const& got) {
  auto const same = [](double a, double b) { return std::isnan(b) ? std::isnan(a) : a == b; };
  bool const right = same(got.forward, c.a) && same(got.a, c.a) && same(got.dg, c.dg) &&
                     (!c.activation.gated() || same(got.du, c.du));
  if (right) return {};
  char text[256];
  std::snprintf(
      text, sizeof(text), "kind %d, g %g, u %g: a %g (forward %g), dg %g, du %g; not %g, %g, %g",
      static_cast<int>(c.activation.kind), static_cast<double>(c.point.g),
      static_cast<double>(c.point.u), got.a, got.forward, got.dg, got.du, c.a, c.dg, c.du);
  return text;
}

/// What docs/numerics.md says of the tails on a GPU: |error| of phi(x) is at most absolute * |x|, and at most 1 % of
/// phi(x) from `from` on; below, where phi(x) is tiny, it is more somewhere.
struct Tail {
  ActivationKind kind;
  float from;
  double absolute;
};
constexpr Tail kCudaTails[] = {{ActivationKind::silu, -3.7f, 0x1p-12},
                               {ActivationKind::gelu, -1.98f, 0x1p-12},
                               {ActivationKind::gelu_erf, -4.3f, 0x1p-22}};

inline std::vector<Point> tail_points() {
  std::vector<Point> result;
  for (float const x : all_finite()) {
    if (std::abs(x) < 100.0f && std::abs(x) > 1e-30f) result.push_back({x, 1.0f, 1.0f});
  }
  return result;
}
inline std::string tail_fault(Tail const& tail, std::vector<Point> const& points,
                              std::vector<Answer> const& answers) {
  constexpr long double kRounding = 0x1p-22L;
  bool is_lost = false;
  for (std::size_t i = 0; i < points.size(); ++i) {
    long double const x = points[i].g, exact = exact_phi(tail.kind, x, 1).phi;
    long double const error = std::abs(answers[i].forward - exact);
    bool const is_large = error > 0.01L * std::abs(exact);
    is_lost |= is_large;
    if (error <= tail.absolute * std::abs(x) + kRounding * std::abs(exact) &&
        !(is_large && points[i].g >= tail.from)) {
      continue;
    }
    char text[256];
    std::snprintf(text, sizeof(text), "kind %d: phi(%.9Lg) is %.9g, not %.9Lg",
                  static_cast<int>(tail.kind), x, answers[i].forward, exact);
    return text;
  }
  return is_lost ? "" : "no tail is lost: docs/numerics.md says too little of this GPU";
}

}  // namespace tessera::activation_walk
