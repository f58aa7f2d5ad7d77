// SPDX-License-Identifier: Apache-2.0
// Chooses the transfer of an exchange, from its shape alone, so alike on all ranks.
#pragma once

#include "expert_parallel/plan/protocol.hpp"

namespace tessera::expert_parallel {

/// Bytes per second in one direction, measured: docs/notebook/2026-11-21-two-gpus.md
constexpr double kLinkRate = 350e9;

constexpr Transfer kTransfers[] = {Transfer::direct, Transfer::once, Transfer::partial_combine};
constexpr char const* transfer_name(Transfer transfer) {
  constexpr char const* kNames[] = {"direct", "once", "partial-combine"};
  return kNames[static_cast<int>(transfer)];
}

/// Rows of a token that cross to other ranks, choices drawn evenly.
inline double rows_across(ExchangeShape const& s, Transfer transfer) {
  double const others = s.ranks - 1;
  if (transfer == Transfer::direct) return s.max_top_k * others / s.ranks;
  double misses = 1;  // that a rank has none of its experts
  for (std::int32_t k = 0; k < s.max_top_k; ++k) misses *= others / s.ranks;
  return others * (1 - misses);
}

/// Results of a token that come back from other ranks, choices drawn evenly.
inline double results_across(ExchangeShape const& s) {
  double const added =
      static_cast<double>(s.partial_experts()) / s.local_experts();  // of the choices
  double misses = 1;  // that none of a rank's experts whose results are added up is chosen
  for (std::int32_t k = 0; k < s.max_top_k; ++k) misses *= 1 - added / s.ranks;
  return rows_across(s, Transfer::direct) * (1 - added) + (s.ranks - 1) * (1 - misses);
}

/// direct, unless the rows that cross take three quarters of the time of the GEMMs that could hide them, and crossing
/// once per owner would save a quarter of them, if choices are even. Where the link has time left, `once` makes
/// FlashDMoE's layers 1 to 6% slower (docs/notebook/2026-11-23-converged-warps.md). partial combine, if it is allowed,
/// where the rows take three quarters even with `once`, and it saves 75 us of a pass of max_tokens: where it saves 50
/// us, the sums behind the last tasks cost more than that (docs/notebook/2026-11-26-sums-on-owners.md).
inline Transfer choose_transfer(ExchangeShape const& s, bool partial_combine = false) {
  constexpr double kGemms = 650e12;  // FLOP per second
  constexpr double kBusy = 0.75;
  constexpr double kWorthwhile = 0.75;
  double const rows = rows_across(s, Transfer::direct);
  double const row_time = 2.0 * s.hidden / kLinkRate;  // bf16
  double const gemms = s.max_top_k * (s.gated ? 6.0 : 4.0) * s.intermediate * s.hidden / kGemms;
  double const rows_once = rows_across(s, Transfer::once);
  bool const pays = 2 * rows * row_time > kBusy * gemms && rows_once <= kWorthwhile * rows;
  if (!pays || !serves_once(s)) return Transfer::direct;
  constexpr double kMinSaving = 75e-6;  // seconds
  ExchangeShape combined = s;
  combined.transfer = Transfer::partial_combine;
  bool const is_late = (rows_once + rows) * row_time > kBusy * gemms;
  bool const saves = s.max_tokens * (rows - results_across(combined)) * row_time > kMinSaving;
  return partial_combine && is_late && saves ? Transfer::partial_combine : Transfer::once;
}

}  // namespace tessera::expert_parallel
