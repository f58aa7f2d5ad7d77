// SPDX-License-Identifier: Apache-2.0
// Routing tables of chosen slots: room for a call of choose_tokens, and what they are by their definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/host/choose_tokens.hpp"
#include "tests/cuda/tables_cases.hpp"

namespace tessera::routing_test {

// What no kernel writes is this.
inline constexpr std::int32_t kUntouched = -7;

// Gives `out` room for the tables of so many slots, and says where it is.
inline cuda::ChoiceTables make_tables(std::int64_t experts, std::size_t slots, Tables& out) {
  out.expert_offsets.assign(static_cast<std::size_t>(experts) + 1, kUntouched);
  out.sort_permutation.assign(slots, kUntouched);
  out.gather_index.assign(slots, kUntouched);
  out.inverse_permutation.assign(slots, kUntouched);
  out.words.assign(kWords, kNotCleared);
  return {.gmem_expert_offsets = out.expert_offsets.data(),
          .gmem_sort_permutation = out.sort_permutation.data(),
          .gmem_gather_index = out.gather_index.data(),
          .gmem_inverse_permutation = out.inverse_permutation.data(),
          .cleared = {out.words.data(), kClearedWords},
          .unused = {out.words.data() + kClearedWords + 1, kUnused}};
}

// The tables by their definition, from slots that end with -1.
inline Tables tables_of(std::int64_t experts, std::vector<std::int32_t> const& ids,
                        std::vector<std::int32_t> const& token_offsets) {
  return host_tables({.name = "", .tokens = 0, .top_k = 0, .experts = static_cast<int>(experts)},
                     {{ids.begin(), ids.end()}, token_offsets});
}

}  // namespace tessera::routing_test
