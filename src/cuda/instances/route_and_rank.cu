// SPDX-License-Identifier: Apache-2.0
#include "../kernels/route_and_rank.cuh"

namespace tessera::cuda {

cudaError_t launch_route_and_rank(RouteArguments const& route, ChooseTokensArguments const& choice,
                                  cudaStream_t stream) {
  return launch_route_and_rank_config<RouteAndRankConfig>(route, choice, stream);
}

bool route_ranks_pairs(RouteArguments const& route) {
  return serves_route_and_rank<RouteAndRankConfig>(route);
}

}  // namespace tessera::cuda
