// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_loss.cuh"

namespace tessera::cuda {

cudaError_t launch_router_loss(RouterLossArguments const& args, cudaStream_t stream) {
  return launch_router_loss_config<RouterLossConfig>(args, stream);
}

}  // namespace tessera::cuda
