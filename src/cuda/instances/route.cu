// SPDX-License-Identifier: Apache-2.0
#include "../kernels/route.cuh"

namespace tessera::cuda {

cudaError_t launch_route(RouteArguments const& args, cudaStream_t stream) {
  return launch_route_config<RouteConfig>(args, stream);
}

}  // namespace tessera::cuda
