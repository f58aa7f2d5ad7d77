// SPDX-License-Identifier: Apache-2.0
// Small cases for the tests of the reference and of the tolerance.
#pragma once

#include "verify/case.hpp"

namespace tessera::verify {

/// A gated layer with biases whose every part matters: sizes that are no multiples of anything, several rows per
/// expert, an expert without rows where the pattern says so.
inline LayerCase small_case(RouterKind router = RouterKind::given) {
  LayerCase layer_case;
  layer_case.desc.shape = {.tokens = 13, .hidden = 10, .intermediate = 6, .experts = 5, .top_k = 2};
  layer_case.desc.bias = true;
  layer_case.desc.router.kind = router;
  layer_case.router_bias = router != RouterKind::given;
  layer_case.seed = 7;
  return layer_case;
}

/// A router's choice on exact logits, or nothing where ids are given.
inline RouterChoice exact_choice(LayerData const& data) {
  MoeDesc const& desc = data.desc;
  if (!router_chooses(desc)) return {};
  reference::Inputs inputs = reference_inputs(data);
  auto const logits = reference::router_logits(inputs);
  std::vector<std::int64_t> topk;
  if (!desc.experts_choose()) {
    topk = reference::select_experts(desc, reference::router_keys(inputs, logits));
  }
  if (!desc.experts_vary()) return {topk, {}, {}};
  inputs.unrounded_ids = topk;
  auto slots = reference::choose_tokens(desc, reference::pair_scores(inputs, logits));
  return {std::move(slots.topk_ids), std::move(slots.token_offsets), std::move(topk)};
}

}  // namespace tessera::verify
