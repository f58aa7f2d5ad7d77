// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_logits.cuh"
#include "../tuning/gemm.hpp"

namespace tessera::cuda {

cudaError_t launch_router_logits(RouterLogitsArguments const& args, int sm_count,
                                 cudaStream_t stream) {
  if (args.x.rows == 0) return cudaSuccess;
  if (args.is_fp32) {
    return args.experts <= RouterLogitsTermsFew::kMaxExperts
               ? launch_router_logits_config<RouterLogitsTermsFew>(args, sm_count, stream)
               : launch_router_logits_config<RouterLogitsTerms>(args, sm_count, stream);
  }
  if (args.experts > RouterLogitsNarrow::kMaxExperts) {
    return launch_router_logits_config<RouterLogitsWide>(args, sm_count, stream);
  }
  return router_logits_is_low(args.x.rows, args.experts, sm_count)
             ? launch_router_logits_config<RouterLogitsLow>(args, sm_count, stream)
             : launch_router_logits_config<RouterLogitsNarrow>(args, sm_count, stream);
}

}  // namespace tessera::cuda
