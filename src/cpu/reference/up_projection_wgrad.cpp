// SPDX-License-Identifier: Apache-2.0
// dw_up[e] = sum over rows r of e of dh_r^T x_{t_r};  db_up[e] = sum_r dh_r.
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void up_projection_wgrad(Inputs const& inputs, Forward const& f, Backward const& b,
                         LogicalWeights& gradients) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  bool const gated = desc.activation.gated();
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      double const* const x = &inputs.x[f.metadata.gather_index[r] * d];
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t const row = e * n + i;
        if (gated) add_scaled(b.dh_gate[r * n + i], x, d, &gradients.gate[row * d]);
        add_scaled(b.dh_up[r * n + i], x, d, &gradients.up[row * d]);
        if (!desc.bias) continue;
        if (gated) gradients.b_gate[row] += b.dh_gate[r * n + i];
        gradients.b_up[row] += b.dh_up[r * n + i];
      }
    }
  }
}

}  // namespace tessera::reference
