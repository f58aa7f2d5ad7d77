// SPDX-License-Identifier: Apache-2.0
// The launchers of sm_100a in a library that has none of its kernels: check_architecture() lets no such GPU get here.
#include "cuda/host/projection_sm100.hpp"

namespace tessera::cuda {

cudaError_t launch_up_projection_fwd_sm100(UpProjectionFwdArguments const&, int, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_down_projection_fwd_sm100(DownProjectionFwdArguments const&, int, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_down_projection_dgrad_sm100(DownProjectionDgradArguments const&, int,
                                               cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_up_projection_dgrad_sm100(UpProjectionDgradArguments const&, int, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}
cudaError_t launch_projection_wgrad_sm100(WgradArguments const&, int, cudaStream_t) {
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace tessera::cuda
