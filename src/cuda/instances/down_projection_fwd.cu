// SPDX-License-Identifier: Apache-2.0
#include "../kernels/down_projection_fwd.cuh"
#include "../tuning/gemm.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor>
cudaError_t launch(DownProjectionFwdArguments const& args, int sm_count, cudaStream_t stream) {
  using Wide = DownProjectionFwdWide<kMajor>;
  using PartialLast = DownProjectionFwdWide<kMajor, gemm::Tail::kHalved>;
  if (args.intermediate <= kDownProjectionResidentUpTo) {
    return launch_down_projection_fwd_config<DownProjectionFwdResident<kMajor>>(args, sm_count,
                                                                                stream);
  }
  return Wide::gemm.last_is_partial(args.hidden)
             ? launch_down_projection_fwd_config<PartialLast>(args, sm_count, stream)
             : launch_down_projection_fwd_config<Wide>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_down_projection_fwd(DownProjectionFwdArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return args.w_down.column_stride == 1 ? launch<gemm::Major::kK>(args, sm_count, stream)
                                        : launch<gemm::Major::kRows>(args, sm_count, stream);
}

}  // namespace tessera::cuda
