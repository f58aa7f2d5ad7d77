// SPDX-License-Identifier: Apache-2.0
// Layers of rows that were grouped ahead of the call, in whose backward pass x and d_o are tokens: several rows may
// read the same one. h, dx and dscores are of rows.
#pragma once

#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera::core {

/// Says whether the rows of a grouped layer gather theirs of x and d_o.
constexpr bool gathers_grouped_rows(MoeDesc const& desc) noexcept {
  return desc.grouping != RowGrouping::slots && desc.shape.variable_experts;
}
/// Counts the rows of dx: those of the layer where rows are grouped, else tokens.
constexpr std::int64_t dx_rows(MoeDesc const& desc) noexcept {
  return gathers_grouped_rows(desc) ? desc.num_slots() : desc.shape.tokens;
}

/// Refuses such layers where tables are made, or h and o: rows are each a row of x there.
inline Status refuse_gathered_rows(MoeDesc const& desc) noexcept {
  if (!gathers_grouped_rows(desc)) return {};
  return Status::invalid(
      "grouping=%d with variable_experts: rows that gather tokens are of backward passes, with "
      "tables that "
      "ExpertParallel::dispatch() has written; leave variable_experts out",
      static_cast<int>(desc.grouping));
}

}  // namespace tessera::core
