// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_dlogits.cuh"
#include "../kernels/router_dlogits_rounded.cuh"

namespace tessera::cuda {

cudaError_t launch_router_dlogits(RouterGradientArguments const& args, cudaStream_t stream) {
  return launch_router_dlogits_config<RouterDlogitsConfig>(args, stream);
}

cudaError_t launch_router_dlogits_rounded(RoundedGradientArguments const& args,
                                          cudaStream_t stream) {
  return launch_router_dlogits_rounded_config<RouterDlogitsRoundedConfig>(args, stream);
}

}  // namespace tessera::cuda
