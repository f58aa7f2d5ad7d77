// SPDX-License-Identifier: Apache-2.0
// What a GPU gets of the kernel to copy: an instance for each order in which the weights may lie.
#include "tests/example/scaled_projection_fwd.cuh"

#include "cuda/tuning/gemm.hpp"

namespace tessera::cuda::example {

cudaError_t launch_scaled_projection_fwd(DownProjectionFwdArguments const& args,
                                         float const* gmem_scale, int sm_count,
                                         cudaStream_t stream) {
  using KMajor = DownProjectionFwdWide<gemm::Major::kK>;
  using RowsMajor = DownProjectionFwdWide<gemm::Major::kRows>;
  if (args.rows == 0) return cudaSuccess;
  return args.w_down.column_stride == 1
             ? launch_scaled_projection_fwd_config<KMajor>(args, gmem_scale, sm_count, stream)
             : launch_scaled_projection_fwd_config<RowsMajor>(args, gmem_scale, sm_count, stream);
}

}  // namespace tessera::cuda::example
