// SPDX-License-Identifier: Apache-2.0
// dx row r = dh_r w_up[e].
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void up_projection_dgrad(Inputs const& inputs, Forward const& f, Backward& b) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  b.dx_rows.assign(f.metadata.rows() * d, 0);
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t const row = (e * n + i) * d;
        if (desc.activation.gated()) {
          add_scaled(b.dh_gate[r * n + i], &f.weights.gate[row], d, &b.dx_rows[r * d]);
        }
        add_scaled(b.dh_up[r * n + i], &f.weights.up[row], d, &b.dx_rows[r * d]);
      }
    }
  }
}

}  // namespace tessera::reference
