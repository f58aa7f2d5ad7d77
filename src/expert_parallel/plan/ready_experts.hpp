// SPDX-License-Identifier: Apache-2.0
// Chooses the experts whose own rows are multiplied while the peers' tokens come, from the shape alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "expert_parallel/plan/choose_transfer.hpp"

namespace tessera::expert_parallel {

/// Returns the first of this rank's experts that begin with rows of this rank's tokens. There are as many as take
/// down_projection_dgrad as long as the link takes for the peers' tokens, as their weights are read twice, and they are
/// the last ones: their weights are still in L2 when the rest of their rows is due. The number of tokens is no matter,
/// as both times grow with it (docs/notebook/2026-11-30-own-rows-first.md).
inline std::int32_t first_ready_expert(ExchangeShape const& s) {
  constexpr double kDgrad = 500e12;  // FLOP per second, its epilogue included
  double const arrival =
      2.0 * s.hidden * (s.ranks - 1) / kLinkRate;  // seconds for each token of a rank, bf16
  double const own_rows = static_cast<double>(s.max_top_k) / s.ranks;
  double const multiplied = 2.0 * own_rows * s.hidden * s.intermediate / kDgrad;
  double const share = std::min(1.0, arrival / multiplied);
  return s.local_experts() - static_cast<std::int32_t>(std::ceil(share * s.local_experts()));
}

}  // namespace tessera::expert_parallel
