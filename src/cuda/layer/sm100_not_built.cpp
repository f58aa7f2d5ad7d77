// SPDX-License-Identifier: Apache-2.0
// The launchers of sm_100a in a library that has none of its kernels: check_architecture() lets no such GPU get here.
#include "cuda/host/mxfp8.hpp"
#include "cuda/host/projection_sm100.hpp"

namespace tessera::cuda {

#define TESSERA_NOT_BUILT(launch, Arguments)                \
  cudaError_t launch(Arguments const&, int, cudaStream_t) { \
    return cudaErrorNoKernelImageForDevice;                 \
  }
TESSERA_NOT_BUILT(launch_up_projection_fwd_sm100, UpProjectionFwdArguments)
TESSERA_NOT_BUILT(launch_down_projection_fwd_sm100, DownProjectionFwdArguments)
TESSERA_NOT_BUILT(launch_down_projection_dgrad_sm100, DownProjectionDgradArguments)
TESSERA_NOT_BUILT(launch_up_projection_dgrad_sm100, UpProjectionDgradArguments)
TESSERA_NOT_BUILT(launch_projection_wgrad_sm100, WgradArguments)
TESSERA_NOT_BUILT(launch_up_projection_fwd_mxfp8, UpProjectionFwdMxfp8Arguments)
TESSERA_NOT_BUILT(launch_down_projection_fwd_mxfp8, DownProjectionFwdMxfp8Arguments)
TESSERA_NOT_BUILT(launch_down_projection_dgrad_mxfp8, DownProjectionDgradMxfp8Arguments)
TESSERA_NOT_BUILT(launch_up_projection_dgrad_mxfp8, UpProjectionDgradMxfp8Arguments)
#undef TESSERA_NOT_BUILT

cudaError_t launch_quantise_rows_mxfp8(QuantiseRowsMxfp8Arguments const&, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_dequantise_rows_mxfp8(DequantiseRowsMxfp8Arguments const&, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_quantise_weights_mxfp8(QuantiseWeightsMxfp8Arguments const&, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace tessera::cuda
