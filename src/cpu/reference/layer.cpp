// SPDX-License-Identifier: Apache-2.0
// o_t = sum over slots j of t of s_j * (act(x_t w_up[e_j]^T + b_up) w_down[e_j]^T + b_down), and its gradients.
#include "cpu/reference/layer.hpp"

namespace tessera::reference {

Forward begin_forward(Inputs const& inputs) {
  MoeDesc const& desc = inputs.desc;
  Forward f;
  f.metadata = metadata(desc, inputs.topk_ids, inputs.token_offsets);
  if (desc.router.kind == RouterKind::given) {
    f.scores = inputs.scores;
  } else {
    f.logits = router_logits(inputs);
    f.scores = router_scores(inputs, f.metadata, f.logits);
  }
  f.weights = logical_weights(desc, inputs.weights);
  return f;
}

Forward forward(Inputs const& inputs) {
  MoeDesc const& desc = inputs.desc;
  Forward f = begin_forward(inputs);
  up_projection_fwd(inputs, f);
  down_projection_fwd(inputs, f);
  f.o.assign(desc.shape.tokens * desc.shape.hidden, 0);
  aggregate(desc, f.metadata, f.y, &f.scores, f.o);
  return f;
}

Backward backward(Inputs const& inputs, Forward const& f, Values const& d_o) {
  MoeDesc const& desc = inputs.desc;
  Backward b;
  LogicalWeights gradients = zero_weights(desc);
  down_projection_dgrad(inputs, f, d_o, b);
  down_projection_wgrad(inputs, f, d_o, b, gradients);
  up_projection_dgrad(inputs, f, b);
  up_projection_wgrad(inputs, f, b, gradients);
  b.dx.assign(desc.shape.tokens * desc.shape.hidden, 0);
  aggregate(desc, f.metadata, b.dx_rows, nullptr, b.dx);
  if (desc.router.kind != RouterKind::given) router_backward(inputs, f, b);
  b.gradients = stored_weights(desc, gradients);
  return b;
}

}  // namespace tessera::reference
