// SPDX-License-Identifier: Apache-2.0
// Random supported cases with pairwise coverage.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/context.hpp"
#include "verify/case.hpp"

namespace tessera::verify {

/// Holds what a case was made to contain, besides the pairs.
struct RandomCase {
  LayerCase layer_case;
  bool large = false;  ///< T >= 512 and E >= 32: a fifth of all cases
};

/// `count` cases drawn from `seed`. What the library serves is asked of it (workspace_bytes). Each pair of values of
/// (router, round, activation, layout, dtype, routing) that can go together appears, as far as `count` allows;
/// from 100 cases on so do T = 0 and 1, K = 1 and E, empty experts, one expert for all, sentinels, variable counts,
/// replayed and int64 ids, n and d that are no multiples of 64. Every tenth case quantises its operands, or all do
/// where `precision` says how; such a case counts for no pair.
std::vector<RandomCase> random_cases(Context const& context, std::int64_t count, std::uint64_t seed,
                                     std::optional<Precision> precision = std::nullopt);

/// Pairs that can go together, and how many of them `cases` hold.
struct PairCoverage {
  std::int64_t possible = 0, covered = 0;
};
PairCoverage pair_coverage(Context const& context, std::vector<RandomCase> const& cases);

}  // namespace tessera::verify
