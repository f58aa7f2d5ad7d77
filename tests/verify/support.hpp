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

}  // namespace tessera::verify
