// SPDX-License-Identifier: Apache-2.0
// The launchers of Hopper's GEMMs in a library that has none of them: check_architecture() lets no such GPU get here.
#include "cuda/host/low_precision.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/host/router_backward.hpp"

namespace tessera::cuda {

#define TESSERA_NOT_BUILT(launch, Arguments)                \
  cudaError_t launch(Arguments const&, int, cudaStream_t) { \
    return cudaErrorNoKernelImageForDevice;                 \
  }
TESSERA_NOT_BUILT(launch_router_logits, RouterLogitsArguments)
TESSERA_NOT_BUILT(launch_up_projection_fwd, UpProjectionFwdArguments)
TESSERA_NOT_BUILT(launch_down_projection_fwd, DownProjectionFwdArguments)
TESSERA_NOT_BUILT(launch_down_projection_dgrad, DownProjectionDgradArguments)
TESSERA_NOT_BUILT(launch_up_projection_dgrad, UpProjectionDgradArguments)
TESSERA_NOT_BUILT(launch_down_projection_wgrad, DownProjectionWgradArguments)
TESSERA_NOT_BUILT(launch_up_projection_wgrad, UpProjectionWgradArguments)
TESSERA_NOT_BUILT(launch_router_dgrad, RouterDgradArguments)
TESSERA_NOT_BUILT(launch_router_wgrad, RouterWgradArguments)
TESSERA_NOT_BUILT(launch_up_projection_fwd_e4m3, UpProjectionFwdE4m3Arguments)
TESSERA_NOT_BUILT(launch_down_projection_fwd_e4m3, DownProjectionFwdE4m3Arguments)
TESSERA_NOT_BUILT(launch_down_projection_dgrad_e4m3, DownProjectionDgradE4m3Arguments)
TESSERA_NOT_BUILT(launch_up_projection_dgrad_e4m3, UpProjectionDgradE4m3Arguments)
#undef TESSERA_NOT_BUILT

}  // namespace tessera::cuda
