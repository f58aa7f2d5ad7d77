// SPDX-License-Identifier: Apache-2.0
// exp and sigmoid as one fixed sequence of fp32 operations: the same bits for every instruction set and
// device, because FMA, +, * and / are exactly rounded everywhere.
//
//   exp(x) = 2^m * p(r),  m = round(x / ln 2),  r = x - m ln 2 (two-part ln 2),  |r| <= 0.35
// p is the degree-6 polynomial below; the error of exp stays under 1 ulp (tests/core).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/simd.hpp"

namespace tessera::core {

TESSERA_INLINE float exp_fp32(float x) noexcept {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e4p-1f;  // few bits: m * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  constexpr float kLargest = 89.0f, kSmallest = -104.0f;  // beyond: inf and 0
  float const bounded = x > kLargest ? kLargest : (x < kSmallest ? kSmallest : x);  // NaN stays
  float const shifted = std::fma(bounded, kLog2E, kRound);
  float const m = shifted - kRound;
  float r = std::fma(m, -kLn2High, bounded);
  r = std::fma(m, -kLn2Low, r);
  float p = 0x1.6850e4p-10f;
  p = std::fma(p, r, 0x1.123bccp-7f);
  p = std::fma(p, r, 0x1.555b98p-5f);
  p = std::fma(p, r, 0x1.55548ep-3f);
  p = std::fma(p, r, 0x1.fffff8p-2f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // 2^m in two factors, so that subnormal results and the largest ones come out right.
  auto const exponent = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(shifted) -
                                                  std::bit_cast<std::uint32_t>(kRound));
  std::int32_t const half = exponent >> 1;
  auto const power = [](std::int32_t k) {
    return std::bit_cast<float>((static_cast<std::uint32_t>(k) + 127u) << 23);
  };
  return p * power(half) * power(exponent - half);
}

TESSERA_INLINE float sigmoid_fp32(float x) noexcept { return 1.0f / (1.0f + exp_fp32(-x)); }

}  // namespace tessera::core
