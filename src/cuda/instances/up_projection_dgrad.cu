// SPDX-License-Identifier: Apache-2.0
#include "../kernels/up_projection_dgrad.cuh"
#include "../tuning/gemm_backward.hpp"

namespace tessera::cuda {

cudaError_t launch_up_projection_dgrad(UpProjectionDgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  using block::Major;
  if (args.rows == 0) return cudaSuccess;
  return args.w_up[0].column_stride == 1
             ? launch_up_projection_dgrad_config<UpProjectionDgradConfig<Major::kRows>>(
                   args, sm_count, stream)
             : launch_up_projection_dgrad_config<UpProjectionDgradConfig<Major::kK>>(args, sm_count,
                                                                                     stream);
}

}  // namespace tessera::cuda
