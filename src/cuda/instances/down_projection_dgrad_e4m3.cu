// SPDX-License-Identifier: Apache-2.0
#include "../kernels/down_projection_dgrad_e4m3.cuh"
#include "../tuning/low_precision.hpp"

namespace tessera::cuda {

cudaError_t launch_down_projection_dgrad_e4m3(DownProjectionDgradE4m3Arguments const& args,
                                              int sm_count, cudaStream_t stream) {
  if (args.activation.kind != ActivationKind::swiglu) return cudaErrorInvalidValue;
  return launch_down_projection_dgrad_e4m3_config<
      DownProjectionDgradE4m3Config<ActivationKind::swiglu>>(args, sm_count, stream);
}

}  // namespace tessera::cuda
