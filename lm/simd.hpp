// SPDX-License-Identifier: Apache-2.0
// Elementwise loops, compiled once per instruction set and chosen when the program is loaded. Contraction is
// off and sums have a written order, so that every version gives the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// Sanitizers and clang do without the versions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(TESSERA_SANITIZED)
#define TESSERA_LM_SIMD \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), noinline))
#else
#define TESSERA_LM_SIMD
#endif
#define TESSERA_LM_INLINE inline __attribute__((always_inline))

namespace tessera::lm {

inline constexpr std::int64_t kLanes = 16;

/// e^x for x <= 0, to about 1 ulp: 2^m p(r) with m = round(x / ln 2), r = x - m ln 2. No fused operations,
/// and a vector instruction each.
TESSERA_LM_INLINE float exp_of_negative(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e4p-1f;  // few bits: m * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kSmallest = -87.0f;    // below, the result is as good as 0; 2^m stays normal
  float const bounded = x < kSmallest ? kSmallest : x;  // NaN stays
  float const shifted = bounded * kLog2E + kRound;
  float const m = shifted - kRound;
  float const r = (bounded - m * kLn2High) - m * kLn2Low;
  float p = 0x1.6850e4p-10f;
  p = p * r + 0x1.123bccp-7f;
  p = p * r + 0x1.555b98p-5f;
  p = p * r + 0x1.55548ep-3f;
  p = p * r + 0x1.fffff8p-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  std::uint32_t const exponent = std::bit_cast<std::uint32_t>(shifted) + 127u;
  return p * std::bit_cast<float>(exponent << 23);
}

/// sum of term(i) over i in [0, count): kLanes running sums, added pairwise at the end.
template <class Term>
TESSERA_LM_INLINE auto lane_sum(std::int64_t count, Term const& term) {
  decltype(term(count)) lanes[kLanes] = {};
  std::int64_t const whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  std::int64_t const rest = count % kLanes;
  for (std::int64_t lane = 0; lane < rest; ++lane) lanes[lane] += term(whole + lane);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace tessera::lm
