// SPDX-License-Identifier: Apache-2.0
// exp, expm1, log, log1p, sigmoid, softplus and the softmax sum as fixed sequences of fp32 operations: the same bits
// for every instruction set and device, because FMA, +, *, / and sqrt are exactly rounded everywhere.
//
//   exp(x) = 2^m * p(r),  m = round(x / ln 2),  r = x - m ln 2 (two-part ln 2),  |r| <= 0.35
// p is the degree-6 polynomial below; the error of exp stays under 1 ulp (tests/core).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/simd.hpp"

namespace tessera::core {

constexpr float kLn2High = 0x1.62e4p-1f;  // few bits: m * kLn2High is exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;

/// (e^r - 1) / r for abs(r) <= 0.35.
TESSERA_INLINE float expm1_ratio_fp32(float r) noexcept {
  float p = 0x1.6850e4p-10f;
  p = std::fma(p, r, 0x1.123bccp-7f);
  p = std::fma(p, r, 0x1.555b98p-5f);
  p = std::fma(p, r, 0x1.55548ep-3f);
  p = std::fma(p, r, 0x1.fffff8p-2f);
  return std::fma(p, r, 1.0f);
}

/// 1.5 * 2^23: adding it rounds to an integer m, which then stands in the low bits.
constexpr float kExpRound = 12582912.0f;

/// exp(x) = 2^m * p, of which kExpRound + m is `shifted`.
struct ExpParts {
  float p, shifted;
};
TESSERA_INLINE ExpParts exp_parts(float x) noexcept {
  constexpr float kLog2E = 0x1.715476p+0f;
  float const shifted = std::fma(x, kLog2E, kExpRound);
  float const m = shifted - kExpRound;
  float r = std::fma(m, -kLn2High, x);
  r = std::fma(m, -kLn2Low, r);
  return {std::fma(expm1_ratio_fp32(r), r, 1.0f), shifted};
}

TESSERA_INLINE float exp_fp32(float x) noexcept {
  constexpr float kLargest = 89.0f, kSmallest = -104.0f;  // beyond: inf and 0
  float const bounded = x > kLargest ? kLargest : (x < kSmallest ? kSmallest : x);  // NaN stays
  ExpParts const parts = exp_parts(bounded);
  // 2^m in two factors, so that subnormal results and the largest ones come out right.
  auto const exponent = static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, parts.shifted) -
                                                  __builtin_bit_cast(std::uint32_t, kExpRound));
  std::int32_t const half = exponent >> 1;
  auto const power = [](std::int32_t k) {
    return __builtin_bit_cast(float, (static_cast<std::uint32_t>(k) + 127u) << 23);
  };
  return parts.p * power(half) * power(exponent - half);
}

/// exp_fp32 by fewer operations where its result is a normal number: abs(x) <= 80, and no NaN.
TESSERA_INLINE float exp_fp32_of_normal(float x) noexcept {
  ExpParts const parts = exp_parts(x);
  // The nine low bits of kExpRound are 0, so m alone reaches the exponent.
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, parts.p) +
                                       (__builtin_bit_cast(std::uint32_t, parts.shifted) << 23));
}

/// Divides many numbers by one, with the bits of the division: the product q with the reciprocal, which is rounded
/// right, and one step by its remainder (P. Markstein, IBM J. Res. Dev. 34, 1990). q is off by up to 1.5 units in the
/// last place, of which the step leaves 2^-23: so only quotients with an exact remainder below 6 units at the middle of
/// two numbers could round wrong, and tests/core divides all of these. For divisors in [1, 2^20] and dividends in
/// [2^-90, 2^20], where no remainder is subnormal.
class DivisionBy {
 public:
  TESSERA_INLINE explicit DivisionBy(float divisor) noexcept
      : divisor_(divisor), reciprocal_(1.0f / divisor) {}
  [[nodiscard]] TESSERA_INLINE float quotient(float a) const noexcept {
    float const near = a * reciprocal_;
    return std::fma(std::fma(-near, divisor_, a), reciprocal_, near);
  }

 private:
  float divisor_, reciprocal_;
};

/// e^x - 1.
TESSERA_INLINE float expm1_fp32(float x) noexcept {
  constexpr float kSmall = 0.34f;  // further out, nothing that matters cancels
  float const magnitude = x < 0.0f ? -x : x;
  return magnitude < kSmall ? x * expm1_ratio_fp32(x) : exp_fp32(x) - 1.0f;
}

TESSERA_INLINE float sigmoid_fp32(float x) noexcept { return 1.0f / (1.0f + exp_fp32(-x)); }

/// sigmoid(x) and 1 - sigmoid(x), each with its relative accuracy on both sides.
struct SigmoidPair {
  float value, complement;
};
TESSERA_INLINE SigmoidPair sigmoid_pair_fp32(float x) noexcept {
  float const e = exp_fp32(-x);
  float const value = 1.0f / (1.0f + e);
  return {value, x > 0.0f ? e * value : 1.0f - value};
}

/// log(1 + u) for u in [0, 1]: 2 atanh(v) with v = u/(2+u) <= 1/3, its series to v^17.
TESSERA_INLINE float log1p_fp32(float u) noexcept {
  float const v = u / (2.0f + u);
  float const z = v * v;
  float p = 1.0f / 17.0f;
  p = std::fma(p, z, 1.0f / 15.0f);
  p = std::fma(p, z, 1.0f / 13.0f);
  p = std::fma(p, z, 1.0f / 11.0f);
  p = std::fma(p, z, 1.0f / 9.0f);
  p = std::fma(p, z, 1.0f / 7.0f);
  p = std::fma(p, z, 1.0f / 5.0f);
  p = std::fma(p, z, 1.0f / 3.0f);
  float const twice = 2.0f * v;
  return std::fma(twice * z, p, twice);
}

/// log(x) for x >= 1: m ln 2 + log1p(f) with x = 2^m (1 + f). NaN and infinity stay.
TESSERA_INLINE float log_fp32(float x) noexcept {
  constexpr std::uint32_t kMantissa = 0x007fffffu, kOne = 0x3f800000u, kInfinity = 0x7f800000u;
  auto const bits = __builtin_bit_cast(std::uint32_t, x);
  auto const m = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127);
  float const f = __builtin_bit_cast(float, (bits & kMantissa) | kOne) - 1.0f;
  float const value = std::fma(m, kLn2High, std::fma(m, kLn2Low, log1p_fp32(f)));
  return bits < kInfinity ? value : x;
}

/// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
TESSERA_INLINE float softplus_fp32(float x) noexcept {
  float const positive = x < 0.0f ? 0.0f : x;
  float const magnitude = x < 0.0f ? -x : x;
  return positive + log1p_fp32(exp_fp32(-magnitude));
}

/// Sum of count values: 32 interleaved partial sums, then halves folded 16, 8, 4, 2, 1: what a warp does.
inline float warp_sum(float const* values, std::int64_t count) noexcept {
  constexpr std::int64_t kLanes = 32;
  float partial[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) partial[i % kLanes] += values[i];
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

}  // namespace tessera::core
