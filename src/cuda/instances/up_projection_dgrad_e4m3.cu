// SPDX-License-Identifier: Apache-2.0
#include "../kernels/up_projection_dgrad_e4m3.cuh"
#include "../tuning/low_precision.hpp"

namespace tessera::cuda {

cudaError_t launch_up_projection_dgrad_e4m3(UpProjectionDgradE4m3Arguments const& args,
                                            int sm_count, cudaStream_t stream) {
  return launch_up_projection_dgrad_e4m3_config<UpProjectionDgradE4m3Config>(args, sm_count,
                                                                             stream);
}

}  // namespace tessera::cuda
