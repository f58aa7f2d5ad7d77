// SPDX-License-Identifier: Apache-2.0
// dw_down[e][c,i] = sum over rows r of e of dO[t_r,c] * a_scaled[r,i];  db_down[e] = sum_r s_j dO[t_r].
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void down_projection_wgrad(Inputs const& inputs, Forward const& f, Values const& d_o, Backward& b,
                           LogicalWeights& gradients) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      double const* const d_o_t = &d_o[f.metadata.gather_index[r] * d];
      for (std::int64_t c = 0; c < d; ++c) {
        add_scaled(d_o_t[c], &b.a_scaled[r * n], n, &gradients.down[(e * d + c) * n]);
      }
      if (desc.bias) {
        add_scaled(f.scores[f.metadata.sort_permutation[r]], d_o_t, d, &gradients.b_down[e * d]);
      }
    }
  }
}

}  // namespace tessera::reference
