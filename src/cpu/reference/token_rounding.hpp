// SPDX-License-Identifier: Apache-2.0
// Experts take tokens: token rounding and expert choice.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::reference {

/// A token as one expert ranks it: members of the top-k choice first, then by score, then lower token.
struct RankedToken {
  bool member = false;
  double score = 0;
  std::int64_t token = 0;
};

/// Holds what the ranking reads: of every pair its score with c = 1 (unscaled_scores()) and whether it is eligible.
struct PairScores {
  std::vector<double> scores;         ///< [T,E]
  std::vector<char> eligible;         ///< [T,E]
  std::vector<std::int64_t> members;  ///< [T,K] the top-k choice; empty with expert choice
};

/// The tokens of `expert`, best first; those that are not eligible are left out.
std::vector<RankedToken> rank_tokens(MoeDesc const& desc, PairScores const& pairs,
                                     std::int64_t expert);

/// Says where nr_s draws the line: up if X_e < 2^32 * lost/(lost + gained).
struct LostAndGained {
  double lost = 0, gained = 0;
};
LostAndGained lost_and_gained(MoeDesc const& desc, std::vector<RankedToken> const& ranked);

/// m_e. `carry` is the sum of m - f of the experts before.
std::int64_t rounded_count(MoeDesc const& desc, std::int64_t expert,
                           std::vector<RankedToken> const& ranked, std::int64_t carry);

/// Slots by token, then expert; `topk_ids` has P entries, -1 behind the last token's.
struct TokenSlots {
  std::vector<std::int64_t> topk_ids, token_offsets;
};
TokenSlots choose_tokens(MoeDesc const& desc, PairScores const& pairs);

}  // namespace tessera::reference
