// SPDX-License-Identifier: Apache-2.0
// dA'_r = dO_t w_down[e];  ds_j = <dA'_r, a_r> + <dO_t, b_down[e]>;  dh_r = J_act(h_r)^T (s_j dA'_r);
// a_scaled_r = s_j a_r.
#include "cpu/reference/activation.hpp"
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void down_projection_dgrad(Inputs const& inputs, Forward const& f, Values const& d_o, Backward& b) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  bool const gated = desc.activation.gated();
  b.dscores.assign(desc.num_slots(), 0);
  b.dh_gate.resize(f.h_gate.size());
  b.dh_up.resize(f.h_up.size());
  b.a_scaled.resize(f.a.size());

  Values da_unscaled(n);
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      std::int64_t const slot = f.metadata.sort_permutation[r];
      double const score = f.scores[slot];
      double const* const d_o_t = &d_o[f.metadata.gather_index[r] * d];

      da_unscaled.assign(n, 0);
      for (std::int64_t c = 0; c < d; ++c) {
        add_scaled(d_o_t[c], &f.weights.down[(e * d + c) * n], n, da_unscaled.data());
      }
      b.dscores[slot] = dot(da_unscaled.data(), &f.a[r * n], n);
      if (desc.bias) b.dscores[slot] += dot(d_o_t, &f.weights.b_down[e * d], d);

      for (std::int64_t i = r * n; i < (r + 1) * n; ++i) {
        auto const dh = activation_gradient(desc.activation, gated ? f.h_gate[i] : 0, f.h_up[i],
                                            score * da_unscaled[i - r * n]);
        if (gated) b.dh_gate[i] = dh.gate;
        b.dh_up[i] = dh.up;
        b.a_scaled[i] = score * f.a[i];
      }
    }
  }
}

}  // namespace tessera::reference
