// SPDX-License-Identifier: Apache-2.0
// out_t += sum over slots j of t, ascending, sentinels skipped, of s_j * rows[inverse_permutation[j]].
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void aggregate(MoeDesc const& desc, Metadata const& metadata, Values const& rows,
               Values const* weights, Values& out) {
  std::int64_t const d = desc.shape.hidden;
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    for (std::int64_t j = metadata.token_offsets[t]; j < metadata.token_offsets[t + 1]; ++j) {
      std::int64_t const row = metadata.inverse_permutation[j];
      if (row < 0) continue;
      add_scaled(weights == nullptr ? 1 : (*weights)[j], &rows[row * d], d, &out[t * d]);
    }
  }
}

}  // namespace tessera::reference
