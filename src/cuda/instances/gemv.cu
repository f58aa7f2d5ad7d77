// SPDX-License-Identifier: Apache-2.0
#include "../kernels/down_projection_fwd_gemv.cuh"
#include "../kernels/router_logits_gemv.cuh"
#include "../kernels/up_projection_fwd_gemv.cuh"

namespace tessera::cuda {

cudaError_t launch_router_logits_gemv(RouterLogitsArguments const& args, cudaStream_t stream) {
  return args.is_fp32
             ? launch_router_logits_gemv_config<RouterLogitsGemv<float>>(args, stream)
             : launch_router_logits_gemv_config<RouterLogitsGemv<__nv_bfloat16>>(args, stream);
}

cudaError_t launch_up_projection_fwd_gemv(UpProjectionFwdArguments const& args,
                                          cudaStream_t stream) {
  return launch_up_projection_fwd_gemv_config<UpProjectionFwdGemv>(args, stream);
}

cudaError_t launch_down_projection_fwd_gemv(DownProjectionFwdArguments const& args,
                                            cudaStream_t stream) {
  return launch_down_projection_fwd_gemv_config<DownProjectionFwdGemv>(args, stream);
}

}  // namespace tessera::cuda
