// SPDX-License-Identifier: Apache-2.0
#include "../kernels/router_dgrad.cuh"
#include "../kernels/router_wgrad.cuh"
#include "../tuning/gemm_backward.hpp"

namespace tessera::cuda {

cudaError_t launch_router_dgrad(RouterDgradArguments const& args, int sm_count,
                                cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  return args.gmem_tokens != nullptr
             ? launch_router_dgrad_listed_config<RouterDgradListedConfig>(args, sm_count, stream)
             : launch_router_dgrad_config<RouterDgradConfig>(args, sm_count, stream);
}

namespace {

template <bool kGathers>
cudaError_t launch_router_wgrad_of(RouterWgradArguments const& args, int sm_count,
                                   cudaStream_t stream) {
  return router_wgrad_tile_experts(int64_t{args.experts} * args.terms) == 256
             ? launch_router_wgrad_config<RouterWgradConfig<256, kGathers>>(args, sm_count, stream)
             : launch_router_wgrad_config<RouterWgradConfig<128, kGathers>>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_router_wgrad(RouterWgradArguments const& args, int sm_count,
                                cudaStream_t stream) {
  return args.gmem_order != nullptr ? launch_router_wgrad_of<true>(args, sm_count, stream)
                                    : launch_router_wgrad_of<false>(args, sm_count, stream);
}

}  // namespace tessera::cuda
