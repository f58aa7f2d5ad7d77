// SPDX-License-Identifier: Apache-2.0
// Routing tables from slot ids.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::reference {

/// Slot j of token t: token_offsets[t] <= j < token_offsets[t+1]. Rows are sorted by (expert, slot). Slots that token
/// rounding leaves unused belong to no token and own no row.
struct Metadata {
  std::vector<std::int64_t> expert_offsets;       ///< [E+1]
  std::vector<std::int64_t> sort_permutation;     ///< [P] row -> slot, -1 from row R on
  std::vector<std::int64_t> gather_index;         ///< [P] row -> token, 0 from row R on
  std::vector<std::int64_t> inverse_permutation;  ///< [P] slot -> row, -1 at sentinels
  std::vector<std::int64_t> token_offsets;        ///< [T+1]
  [[nodiscard]] std::int64_t rows() const { return expert_offsets.back(); }
};

/// `token_offsets` is used where experts per token vary, else slots are t*K + k.
Metadata metadata(MoeDesc const& desc, std::vector<std::int64_t> const& topk_ids,
                  std::vector<std::int64_t> const& token_offsets);

}  // namespace tessera::reference
