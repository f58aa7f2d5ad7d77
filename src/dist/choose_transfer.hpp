// SPDX-License-Identifier: Apache-2.0
// Which transfer an exchange takes, from its shape alone, so alike on all ranks.
#pragma once

#include "dist/protocol.hpp"

namespace tessera::dist {

/// direct, unless the rows that cross take longer than the GEMMs behind which they might hide, and crossing once per
/// owner saves a quarter of them, choices drawn evenly. Writing a row to all its places at once costs 1 to 6% where the
/// link is not the bound (docs/notebook/2026-11-22-four-gpus.md).
inline Transfer choose_transfer(ExchangeShape const& s) {
  constexpr double kLink = 350e9;    // bytes per second in one direction
  constexpr double kGemms = 650e12;  // FLOP per second
  constexpr double kWorthwhile = 0.75;
  double const others = s.ranks - 1;
  double const rows = s.max_top_k * others / s.ranks;  // of a token, on other ranks
  double misses = 1;                                   // that a rank has none of its experts
  for (std::int32_t k = 0; k < s.max_top_k; ++k) misses *= others / s.ranks;
  double const link = rows * 4 * s.hidden / kLink;  // there and back, bf16
  double const gemms = s.max_top_k * (s.gated ? 6.0 : 4.0) * s.intermediate * s.hidden / kGemms;
  bool const pays = link > gemms && others * (1 - misses) <= kWorthwhile * rows;
  return pays && serves_once(s) ? Transfer::once : Transfer::direct;
}

}  // namespace tessera::dist
