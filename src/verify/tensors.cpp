// SPDX-License-Identifier: Apache-2.0
#include "verify/tensors.hpp"

namespace tessera::verify {

ReferenceTensors reference_tensors(LayerData const& data, reference::Forward const& forward,
                                   reference::Backward const& backward) {
  auto const& gradients = backward.gradients;
  ReferenceTensors tensors = {
      {"o", forward.o},          {"dx", backward.dx},           {"dscores", backward.dscores},
      {"dw_up", gradients.w_up}, {"dw_down", gradients.w_down},
  };
  auto const add_if_any = [&](char const* name, std::vector<double> const& values) {
    if (!values.empty()) tensors[name] = values;
  };
  add_if_any("dw_gate", gradients.w_gate);
  add_if_any("db_up", gradients.b_up);
  add_if_any("db_gate", gradients.b_gate);
  add_if_any("db_down", gradients.b_down);
  if (data.desc.router.kind != RouterKind::given) {
    tensors["logits"] = forward.logits;
    tensors["scores"] = forward.scores;
    tensors["dlogits"] = backward.dlogits;
    tensors["dw_router"] = backward.dw_router;
    if (!data.b_router.empty()) tensors["db_router"] = backward.db_router;
  }
  if (data.gradient_mode == GradientMode::accumulate) {
    for (auto& [name, values] : tensors) {
      if (!is_parameter_gradient(name)) continue;
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] += initial_gradient(name, static_cast<std::int64_t>(i));
      }
    }
  }
  return tensors;
}

}  // namespace tessera::verify
