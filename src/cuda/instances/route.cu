// SPDX-License-Identifier: Apache-2.0
#include "../kernels/route.cuh"

namespace tessera::cuda {

cudaError_t launch_route(RouteArguments const& args, cudaStream_t stream) {
  return launch_route_config<RouteConfig>(args, stream);
}

int32_t route_unit_slots(RouteArguments const& args) { return unit_slots_of<RouteConfig>(args); }

}  // namespace tessera::cuda
