// SPDX-License-Identifier: Apache-2.0
// Elementwise loops, compiled once per instruction set and chosen when the program is loaded. Contraction is
// off and sums have a written order, so that every version gives the same bits.
#pragma once

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
