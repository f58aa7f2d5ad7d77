// SPDX-License-Identifier: Apache-2.0
// The router of a layer on sm_100a: included, so that what they include is emulated. Its GEMMs are the plain twins.
#include "cuda/instances/choose_tokens.cu"
#include "cuda/instances/route.cu"
#include "cuda/instances/route_and_rank.cu"
#include "cuda/kernels/router_dlogits_rounded.cuh"
#include "cuda/layer/ops.hpp"
#include "cuda/plain/router_dgrad.cu"
#include "cuda/plain/router_dlogits.cu"
#include "cuda/plain/router_logits.cu"
#include "cuda/plain/router_wgrad.cu"

namespace tessera::cuda {

// Its own dynamic shared memory is not emulated.
cudaError_t launch_router_dlogits(RouterGradientArguments const& args, cudaStream_t stream) {
  return kOp<RouterGradientArguments>.plain(args, stream);
}

cudaError_t launch_router_dlogits_rounded(RoundedGradientArguments const& args,
                                          cudaStream_t stream) {
  return launch_router_dlogits_rounded_config<RouterDlogitsRoundedConfig>(args, stream);
}

}  // namespace tessera::cuda
