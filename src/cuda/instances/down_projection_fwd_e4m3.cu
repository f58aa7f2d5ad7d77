// SPDX-License-Identifier: Apache-2.0
#include "../kernels/down_projection_fwd_e4m3.cuh"
#include "../tuning/low_precision.hpp"

namespace tessera::cuda {

cudaError_t launch_down_projection_fwd_e4m3(DownProjectionFwdE4m3Arguments const& args,
                                            int sm_count, cudaStream_t stream) {
  return launch_down_projection_fwd_e4m3_config<DownProjectionFwdE4m3Config>(args, sm_count,
                                                                             stream);
}

}  // namespace tessera::cuda
