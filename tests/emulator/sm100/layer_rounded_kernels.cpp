// SPDX-License-Identifier: Apache-2.0
// These are the kernels that a layer launches on Hopper where it rounds tokens or has few. The router, its gradients
// and the experts of few tokens come from the sources that GPUs get; GEMMs with tests of their own are plain twins.
#include "cuda/host/aggregate.hpp"
#include "cuda/instances/choose_tokens.cu"
#include "cuda/instances/down_projection_dgrad_swiglu.cu"
#include "cuda/instances/route.cu"
#include "cuda/instances/route_and_rank.cu"
#include "cuda/instances/router_backward.cu"
#include "cuda/instances/up_projection_dgrad.cu"
#include "cuda/kernels/experts_fwd_few_tokens.cuh"
#include "cuda/kernels/router_dlogits_rounded.cuh"
#include "cuda/plain/down_projection_fwd.cu"
#include "cuda/plain/dscores.cu"
#include "cuda/plain/router_dlogits.cu"
#include "cuda/plain/router_logits.cu"
#include "cuda/plain/split_fp32.cu"
#include "cuda/plain/up_projection_fwd.cu"
#include "cuda/plain/wgrad.cu"

namespace tessera::cuda {

cudaError_t launch_router_dlogits_rounded(RoundedGradientArguments const& args,
                                          cudaStream_t stream) {
  return launch_router_dlogits_rounded_config<RouterDlogitsRoundedConfig>(args, stream);
}

template <>
cudaError_t launch_aggregate_beside<__nv_bfloat16>(AggregateBesideArguments const& args, int,
                                                   cudaStream_t stream) {
  return launch_aggregate<__nv_bfloat16>(args.aggregate, stream);
}

cudaError_t launch_router_logits(RouterLogitsArguments const& args, int, cudaStream_t stream) {
  return launch_router_logits_plain(args, stream);
}
cudaError_t launch_router_logits_gemv(RouterLogitsArguments const& args, cudaStream_t stream) {
  return launch_router_logits_plain(args, stream);
}
cudaError_t launch_up_projection_fwd(UpProjectionFwdArguments const& args, int,
                                     cudaStream_t stream) {
  return launch_up_projection_fwd_plain(args, stream);
}
cudaError_t launch_down_projection_fwd(DownProjectionFwdArguments const& args, int,
                                       cudaStream_t stream) {
  return launch_down_projection_fwd_plain(args, stream);
}
cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sms,
                                          cudaStream_t stream) {
  return launch_experts_fwd_few_tokens_config<ExpertsFwdFewTokens>(args, sms, stream);
}
cudaError_t launch_down_projection_dgrad(DownProjectionDgradArguments const& args, int sms,
                                         cudaStream_t stream) {
  return launch_down_projection_dgrad_of<ActivationKind::swiglu>(args, sms, stream);
}
cudaError_t launch_down_projection_wgrad(DownProjectionWgradArguments const& args, int,
                                         cudaStream_t stream) {
  return launch_wgrad_plain(args, stream);
}
cudaError_t launch_up_projection_wgrad(UpProjectionWgradArguments const& args, int,
                                       cudaStream_t stream) {
  return launch_wgrad_plain(args, stream);
}

}  // namespace tessera::cuda
