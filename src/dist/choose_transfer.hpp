// SPDX-License-Identifier: Apache-2.0
// Which transfer an exchange takes, from its shape alone, so alike on all ranks.
#pragma once

#include "dist/protocol.hpp"

namespace tessera::dist {

/// Bytes per second in one direction, measured: docs/notebook/2026-11-21-two-gpus.md
constexpr double kLinkRate = 350e9;

/// Rows of a token that cross to other ranks, choices drawn evenly. As many results come back with direct as with once.
inline double rows_across(ExchangeShape const& s, Transfer transfer) {
  double const others = s.ranks - 1;
  if (transfer == Transfer::direct) return s.max_top_k * others / s.ranks;
  double misses = 1;  // that a rank has none of its experts
  for (std::int32_t k = 0; k < s.max_top_k; ++k) misses *= others / s.ranks;
  return others * (1 - misses);
}

/// direct, unless the rows that cross take three quarters of the time of the GEMMs behind which they might hide, and
/// crossing once per owner saves a quarter of them, choices drawn evenly. Where the link has time left, FlashDMoE's
/// layers take 1 to 6% longer so (docs/notebook/2026-11-23-converged-warps.md).
inline Transfer choose_transfer(ExchangeShape const& s) {
  constexpr double kGemms = 650e12;  // FLOP per second
  constexpr double kBusy = 0.75;
  constexpr double kWorthwhile = 0.75;
  double const rows = rows_across(s, Transfer::direct);
  double const link = rows * 4 * s.hidden / kLinkRate;  // there and back, bf16
  double const gemms = s.max_top_k * (s.gated ? 6.0 : 4.0) * s.intermediate * s.hidden / kGemms;
  bool const pays = link > kBusy * gemms && rows_across(s, Transfer::once) <= kWorthwhile * rows;
  return pays && serves_once(s) ? Transfer::once : Transfer::direct;
}

}  // namespace tessera::dist
