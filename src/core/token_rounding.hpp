// SPDX-License-Identifier: Apache-2.0
// Token rounding: f_e tokens chose expert e; M_e becomes a multiple of M, the one at or below f_e or the one above:
//   lo = floor(f/M) M,  hi = ceil(f/M) M,  rem = f - lo;  rem = 0: unchanged
//   nr_f       up if 2 rem > M
//   sr_f       up if floor(X_e M / 2^32) < rem    X_e: first word of Philox4x32-10
//   nr_s       up if X_e (N+Q) < N 2^32           N, Q: scores lost by down, gained by up; as nr_f if both are 0
//   balance_f  up if |hi - f + z| < |lo - f + z|, then z += m - f, over ascending e from z = 0. The first is the larger
//              of the two without bars, so that says (hi - f + z) + (lo - f + z) < 0
// Shared by CPU and GPU: for equal fp32 scores both keep the same pairs.
#pragma once

#include <cstdint>

#include "core/philox.hpp"
#include "core/simd.hpp"
#include "tessera/shape.hpp"

namespace tessera::core {

/// Orders an expert's (token, expert) pairs, larger first: members of the top-k choice before others, then by score,
/// NaN above all numbers. Scores are not negative. Equal ranks go to the lower token; 0 is no rank: not eligible.
TESSERA_INLINE std::uint32_t pair_rank(bool member, float score) noexcept {
  constexpr std::uint32_t kNan = 0x7f800001u;  // follows infinity
  std::uint32_t const order =
      score != score ? kNan : __builtin_bit_cast(std::uint32_t, score + 0.0f);
  return (member ? 0x80000000u : 0u) | (order + 1);
}
TESSERA_INLINE bool is_member(std::uint32_t rank) noexcept { return rank >> 31 != 0; }
TESSERA_INLINE float score_of_rank(std::uint32_t rank) noexcept {
  return __builtin_bit_cast(float, (rank & 0x7fffffffu) - 1);
}

/// A score of a sum of nr_s, in units of 2^-30, so that the order of the sum does not matter: truncated, at most
/// 2^32 - 1 units, NaN 0.
TESSERA_INLINE std::uint64_t fixed_point_score(float score) noexcept {
  if (!(score > 0.0f)) return 0;
  return score >= 4.0f ? 0xffffffffu : static_cast<std::uint64_t>(score * 0x1p30f);
}

/// f - lo.
TESSERA_INLINE std::int64_t beyond_tile(std::int64_t members, std::int32_t tile) noexcept {
  return static_cast<std::uint32_t>(members) % static_cast<std::uint32_t>(tile);  // both < 2^31
}

/// Holds what the rules read of one expert.
struct ExpertPairs {
  std::int64_t members = 0;   ///< f_e
  std::int64_t eligible = 0;  ///< other tokens that could be added
  std::uint64_t weakest = 0;  ///< nr_s: N, of the rem members of lowest rank
  std::uint64_t best =
      0;  ///< nr_s: Q, of the hi - f eligible others of highest rank, or as many as there are
  std::int64_t takes = 0;  ///< m_e, the rule's answer: pairs of highest rank that stay
};

/// balance_f of an expert that is not a multiple.
TESSERA_INLINE bool balance_rounds_up(std::int64_t rem, std::int64_t missing,
                                      std::int64_t carry) noexcept {
  return 2 * carry < rem - missing;
}

TESSERA_INLINE bool rounds_up(Router const& router, std::int64_t expert, ExpertPairs const& pairs,
                              std::int64_t carry) noexcept {
  std::int64_t const tile = router.tile, rem = beyond_tile(pairs.members, router.tile),
                     missing = tile - rem;
  switch (router.round) {
    case Rounding::up:
      return true;
    case Rounding::sr_f: {
      std::uint64_t const x = rounding_random(router, expert);
      return static_cast<std::int64_t>(x * static_cast<std::uint64_t>(tile) >> 32) < rem;
    }
    case Rounding::nr_s: {
      if (pairs.weakest + pairs.best == 0) return 2 * rem > tile;
      __extension__ using Wide = unsigned __int128;
      Wide const x = rounding_random(router, expert);
      return x * (pairs.weakest + pairs.best) < Wide{pairs.weakest} << 32;
    }
    case Rounding::balance_f:
      return balance_rounds_up(rem, missing, carry);
    case Rounding::nr_f:
      return 2 * rem > tile;
    default:
      return false;
  }
}

/// m_e. Going up stops where no eligible token is left, so m_e need not be a multiple then.
TESSERA_INLINE std::int64_t rounded_count(Router const& router, std::int64_t expert,
                                          ExpertPairs const& pairs, std::int64_t carry) noexcept {
  std::int64_t const rem = beyond_tile(pairs.members, router.tile);
  if (rem == 0) return pairs.members;
  if (!rounds_up(router, expert, pairs, carry)) return pairs.members - rem;
  std::int64_t const missing = router.tile - rem;
  return pairs.members + (missing < pairs.eligible ? missing : pairs.eligible);
}

/// Tokens that an expert takes by expert choice, of those that are not padding; capacity 0: an even share of all slots.
TESSERA_INLINE std::int64_t expert_takes(std::int64_t capacity, std::int64_t eligible,
                                         std::int64_t top_k, std::int64_t experts) noexcept {
  std::int64_t const wanted = capacity != 0 ? capacity : (eligible * top_k + experts - 1) / experts;
  return wanted < eligible ? wanted : eligible;
}

/// Fills in `takes` of every expert.
inline void round_experts(Router const& router, std::int64_t experts, ExpertPairs* pairs) noexcept {
  std::int64_t carry = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    pairs[e].takes = rounded_count(router, e, pairs[e], carry);
    carry += pairs[e].takes - pairs[e].members;
  }
}

}  // namespace tessera::core
