// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_logits_gemv.cuh"

namespace tessera::cuda {

cudaError_t launch_router_logits_gemv(RouterLogitsArguments const& args, cudaStream_t stream) {
  return args.is_fp32
             ? launch_router_logits_gemv_config<RouterLogitsGemv<float>>(args, stream)
             : launch_router_logits_gemv_config<RouterLogitsGemv<__nv_bfloat16>>(args, stream);
}

}  // namespace tessera::cuda
