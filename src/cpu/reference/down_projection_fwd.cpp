// SPDX-License-Identifier: Apache-2.0
// y_r = a_r w_down[e]^T + b_down[e].
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

void down_projection_fwd(Inputs const& inputs, Forward& f) {
  MoeDesc const& desc = inputs.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  f.y.resize(f.metadata.rows() * d);
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      for (std::int64_t c = 0; c < d; ++c) {
        f.y[r * d + c] = dot(&f.a[r * n], &f.weights.down[(e * d + c) * n], n) +
                         (desc.bias ? f.weights.b_down[e * d + c] : 0);
      }
    }
  }
}

}  // namespace tessera::reference
