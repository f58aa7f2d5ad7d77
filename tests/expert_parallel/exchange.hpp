// SPDX-License-Identifier: Apache-2.0
// Exchanges drawn from a seed: shapes and routings of several ranks, the usual and the awkward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "expert_parallel/plan/plan.hpp"

namespace tessera::expert_parallel {

/// What every rank's router chose.
struct Exchange {
  ExchangeShape shape;
  std::vector<std::vector<std::int32_t>> ids;  ///< [rank][token*max_top_k + choice], -1: no row

  [[nodiscard]] std::int32_t pairs(std::int32_t rank) const {
    return static_cast<std::int32_t>(ids[static_cast<std::size_t>(rank)].size());
  }
  [[nodiscard]] std::int32_t tokens(std::int32_t rank) const {
    return pairs(rank) / shape.max_top_k;
  }
  [[nodiscard]] std::int32_t expert(std::int32_t rank, std::int32_t pair) const {
    return ids[static_cast<std::size_t>(rank)][static_cast<std::size_t>(pair)];
  }
  /// c[source][expert].
  [[nodiscard]] std::vector<std::int32_t> counts() const {
    std::vector<std::int32_t> c(static_cast<std::size_t>(shape.ranks * shape.experts), 0);
    for (std::int32_t r = 0; r < shape.ranks; ++r) {
      for (std::int32_t const e : ids[static_cast<std::size_t>(r)]) {
        if (e >= 0) ++c[static_cast<std::size_t>(r * shape.experts + e)];
      }
    }
    return c;
  }
};

enum class Pattern { random, one_expert, one_owner, idle_rank, sentinels, repeats };
constexpr Pattern kPatterns[] = {Pattern::random, Pattern::one_expert, Pattern::one_owner,
                                 Pattern::idle_rank, Pattern::sentinels};

/// Tokens with up to max_top_k experts each, distinct but in `repeats`, where all choices are one expert's; ranks
/// differ in tokens.
inline Exchange draw_exchange(ExchangeShape const& shape, Pattern pattern, std::uint64_t seed) {
  std::mt19937_64 rng(seed * 0x9e3779b97f4a7c15u + 1);
  auto const below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(n));
  };
  std::int32_t const favourite = static_cast<std::int32_t>(seed) % shape.ranks;
  Exchange exchange{.shape = shape, .ids = {}};
  for (std::int32_t r = 0; r < shape.ranks; ++r) {
    bool const idle = pattern == Pattern::idle_rank && r == shape.ranks - 1;
    std::int32_t const tokens = idle ? 0 : std::max(shape.max_tokens - (r == 0 ? 0 : below(3)), 0);
    std::vector<std::int32_t> ids;
    for (std::int32_t t = 0; t < tokens; ++t) {
      std::vector<std::int32_t> experts(static_cast<std::size_t>(shape.experts));
      std::iota(experts.begin(), experts.end(), 0);
      std::shuffle(experts.begin(), experts.end(), rng);
      if (pattern == Pattern::one_owner) {
        std::stable_partition(experts.begin(), experts.end(),
                              [&](std::int32_t e) { return shape.owner(e) == favourite; });
      }
      if (pattern == Pattern::one_expert) experts.assign(1, shape.experts - 1);
      if (pattern == Pattern::repeats) {
        experts.assign(static_cast<std::size_t>(shape.max_top_k), shape.experts - 1);
      }
      for (std::size_t k = 0; k < static_cast<std::size_t>(shape.max_top_k); ++k) {
        bool const none = k >= experts.size() || (pattern == Pattern::sentinels && below(2) == 0);
        ids.push_back(none ? -1 : experts[k]);
      }
    }
    exchange.ids.push_back(ids);
  }
  return exchange;
}

}  // namespace tessera::expert_parallel
