// SPDX-License-Identifier: Apache-2.0
// f = tokens that chose the expert, lo = floor(f/M) M, hi = ceil(f/M) M, rem = f - lo. The expert keeps the first m of
// its ranking, m = f where rem = 0, else lo or min(hi, what is eligible):
//   nr_f       up if 2 rem > M
//   sr_f       up if floor(X M / 2^32) < rem
//   nr_s       up if X (N + Q) < N 2^32: N the scores that down loses, Q those that up gains, floor(2^30 s) each
//   balance_f  up if |hi - f + z| < |lo - f + z|, z the sum of m - f so far
// Expert choice: m = capacity, no token is a member.
#include "cpu/reference/token_rounding.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/philox.hpp"

namespace tessera::reference {

std::vector<RankedToken> rank_tokens(MoeDesc const& desc, PairScores const& pairs,
                                     std::int64_t expert) {
  std::int64_t const experts = desc.shape.experts, top_k = desc.shape.top_k;
  std::vector<RankedToken> ranked;
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    bool member = false;
    if (!pairs.members.empty()) {
      auto const first = pairs.members.begin() + t * top_k;
      member = std::find(first, first + top_k, expert) != first + top_k;
    }
    if (member || pairs.eligible[t * experts + expert] != 0) {
      ranked.push_back({member, pairs.scores[t * experts + expert], t});
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](RankedToken const& a, RankedToken const& b) {
    if (a.member != b.member) return a.member;
    return std::isnan(a.score) ? !std::isnan(b.score) : a.score > b.score;
  });
  return ranked;
}

namespace {

struct Multiples {
  std::int64_t members, lo, hi, most;
};

Multiples multiples(MoeDesc const& desc, std::vector<RankedToken> const& ranked) {
  std::int64_t const tile = desc.router.tile;
  auto const members = static_cast<std::int64_t>(std::count_if(
      ranked.begin(), ranked.end(), [](RankedToken const& token) { return token.member; }));
  return {members, members / tile * tile, (members + tile - 1) / tile * tile, std::ssize(ranked)};
}

}  // namespace

LostAndGained lost_and_gained(MoeDesc const& desc, std::vector<RankedToken> const& ranked) {
  auto const [members, lo, hi, most] = multiples(desc, ranked);
  LostAndGained sums;
  for (std::int64_t i = lo; i < std::min(hi, most); ++i) {
    double const units = std::isnan(ranked[i].score) ? 0 : std::floor(0x1p30 * ranked[i].score);
    (i < members ? sums.lost : sums.gained) += std::min(units, 0x1p32 - 1);
  }
  return sums;
}

std::int64_t rounded_count(MoeDesc const& desc, std::int64_t expert,
                           std::vector<RankedToken> const& ranked, std::int64_t carry) {
  Router const& router = desc.router;
  auto const [f, lo, hi, most] = multiples(desc, ranked);
  std::int64_t const rem = f - lo;
  auto const x = static_cast<double>(core::rounding_random(router, expert));
  bool up = false;
  switch (router.round) {
    case Rounding::none:
      return f;
    case Rounding::nr_f:
      up = 2 * rem > router.tile;
      break;
    case Rounding::sr_f:  // exact: x M < 2^63, its quotient by 2^32 is an integer part
      up = static_cast<std::int64_t>(static_cast<std::uint64_t>(x) *
                                     static_cast<std::uint64_t>(router.tile) / 0x100000000u) < rem;
      break;
    case Rounding::nr_s: {
      auto const [lost, gained] = lost_and_gained(desc, ranked);
      up = lost + gained == 0 ? 2 * rem > router.tile : x * (lost + gained) < lost * 0x1p32;
      break;
    }
    case Rounding::balance_f:
      up = std::abs(hi - f + carry) < std::abs(lo - f + carry);
      break;
    case Rounding::up:
      up = true;
      break;
    case Rounding::down:
      break;
  }
  return up ? std::min(hi, most) : lo;
}

TokenSlots choose_tokens(MoeDesc const& desc, PairScores const& pairs) {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  std::vector<std::vector<std::int64_t>> experts_of(tokens);
  std::int64_t carry = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    auto const ranked = rank_tokens(desc, pairs, e);
    std::int64_t const count =
        desc.experts_choose() ? desc.expert_capacity() : rounded_count(desc, e, ranked, carry);
    carry += count - multiples(desc, ranked).members;
    for (std::int64_t i = 0; i < count; ++i) experts_of[ranked[i].token].push_back(e);
  }
  TokenSlots slots;
  slots.token_offsets.push_back(0);
  for (auto const& own : experts_of) {
    slots.topk_ids.insert(slots.topk_ids.end(), own.begin(), own.end());
    slots.token_offsets.push_back(std::ssize(slots.topk_ids));
  }
  slots.topk_ids.resize(desc.num_slots(), -1);
  return slots;
}

}  // namespace tessera::reference
