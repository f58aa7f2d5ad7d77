// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding, of routers without a softmax over all: dscores and dlogits.
// Host side: the call's arguments, which are the kernel's parameters too, and the launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "router_backward.hpp"

namespace tessera::cuda {

/// Both, from the partial sums to dlogits; `rounded` reads the dscores that `dscores` makes.
struct RoundedGradientArguments {
  DscoresArguments dscores;
  RoundedDlogitsArguments rounded;
  bool starts_early = false;  // while the previous kernel of the stream ends
};

/// The fast kernel, for calls that refuse() of layer/select.hpp lets pass: launches on `stream`; allocates nothing,
/// waits for nothing, and leaves the scratch of `rounded` alone.
cudaError_t launch_router_dlogits_rounded(RoundedGradientArguments const& args,
                                          cudaStream_t stream);

}  // namespace tessera::cuda
