// SPDX-License-Identifier: Apache-2.0
// h_r = x_t w_up[e]^T + b_up[e], a_r = act(h_r), for row r of expert e, t = gather_index[r].
#include "cpu/reference/activation.hpp"
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void up_projection_fwd(Inputs const& inputs, Forward& f) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  bool const gated = desc.activation.gated();
  f.h_gate.resize(gated ? f.metadata.rows() * n : 0);
  f.h_up.resize(f.metadata.rows() * n);
  f.a.resize(f.metadata.rows() * n);

  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      double const* const x = &inputs.x[f.metadata.gather_index[r] * d];
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t const row = e * n + i;
        double gate = 0;
        if (gated) {
          gate = dot(x, &f.weights.gate[row * d], d) + (desc.bias ? f.weights.b_gate[row] : 0);
          f.h_gate[r * n + i] = gate;
        }
        double const up = dot(x, &f.weights.up[row * d], d) + (desc.bias ? f.weights.b_up[row] : 0);
        f.h_up[r * n + i] = up;
        f.a[r * n + i] = activate(desc.activation, gate, up);
      }
    }
  }
}

}  // namespace tessera::reference
