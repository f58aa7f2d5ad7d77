// SPDX-License-Identifier: Apache-2.0
// row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}; ids outside [0,E) own no row.
#include "cpu/reference/metadata.hpp"

namespace tessera::reference {

Metadata metadata(MoeDesc const& desc, std::vector<std::int64_t> const& topk_ids,
                  std::vector<std::int64_t> const& token_offsets) {
  std::int64_t const slots = desc.num_slots(), experts = desc.shape.experts;
  Metadata m;
  m.sort_permutation.assign(slots, -1);
  m.gather_index.assign(slots, 0);
  m.inverse_permutation.assign(slots, -1);
  m.expert_offsets.push_back(0);
  if (desc.experts_vary()) {
    m.token_offsets = token_offsets;
  } else {
    for (std::int64_t t = 0; t <= desc.shape.tokens; ++t) {
      m.token_offsets.push_back(t * desc.shape.top_k);
    }
  }

  std::vector<std::vector<std::int64_t>> slots_of(experts);
  std::vector<std::int64_t> token_of(slots);
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    for (std::int64_t j = m.token_offsets[t]; j < m.token_offsets[t + 1]; ++j) {
      token_of[j] = t;
      if (topk_ids[j] >= 0 && topk_ids[j] < experts) slots_of[topk_ids[j]].push_back(j);
    }
  }
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t const j : slots_of[e]) {
      m.sort_permutation[row] = j;
      m.gather_index[row] = token_of[j];
      m.inverse_permutation[j] = row;
      ++row;
    }
    m.expert_offsets.push_back(row);
  }
  return m;
}

}  // namespace tessera::reference
