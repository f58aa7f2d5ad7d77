// SPDX-License-Identifier: Apache-2.0
// Facts that follow from a router's options alone.
#pragma once

#include "tessera/shape.hpp"

namespace tessera {

/// True if the token rounding draws numbers from (seed, step, layer).
constexpr bool draws(Router const& router) noexcept {
  return router.round == Rounding::sr_f || router.round == Rounding::nr_s;
}

/// The same router in one spelling: softmax_topk with normalize_scores becomes softmax_topk_renorm.
constexpr Router resolved(Router router) noexcept {
  if (router.kind == RouterKind::softmax_topk && router.normalize_scores) {
    router.kind = RouterKind::softmax_topk_renorm;
    router.normalize_scores = false;
  }
  return router;
}

/// True if every score of the router is one number whatever its logits are, so that no gradient of o can ever reach
/// them: a softmax over one expert, or scores divided by their sum where a token has one (top_k = 1). Train such a
/// layer with softmax_topk, or with sigmoid_bias without normalize_scores. False for given scores.
constexpr bool scores_are_constant(MoeDesc const& desc) noexcept {
  Router const router = resolved(desc.router);
  MoeShape const& shape = desc.shape;
  if (router.kind == RouterKind::given) return false;
  if (router.route_scale == 0) return true;
  if (router.kind == RouterKind::softmax_topk || router.kind == RouterKind::expert_choice) {
    return shape.experts == 1;
  }
  bool const softmax =
      router.kind == RouterKind::topk_softmax || router.kind == RouterKind::softmax_topk_renorm;
  if (!softmax && !router.normalize_scores) return false;
  // Token rounding that adds tokens gives them scores of another sum; then P is larger than T*K.
  return shape.experts == 1 || (shape.top_k == 1 && !shape.variable_experts &&
                                desc.num_slots() == shape.tokens * shape.top_k);
}

}  // namespace tessera
