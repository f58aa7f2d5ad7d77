// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_logits.cuh"
#include "../tuning/gemm.hpp"

namespace tessera::cuda {

cudaError_t launch_router_logits(RouterLogitsArguments const& args, int sm_count,
                                 cudaStream_t stream) {
  if (args.x.rows == 0) return cudaSuccess;
  return args.experts <= RouterLogitsNarrow::kMostExperts
             ? launch_router_logits_config<RouterLogitsNarrow>(args, sm_count, stream)
             : launch_router_logits_config<RouterLogitsWide>(args, sm_count, stream);
}

}  // namespace tessera::cuda
