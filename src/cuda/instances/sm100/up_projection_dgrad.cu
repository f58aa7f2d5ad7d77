// SPDX-License-Identifier: Apache-2.0
#include "../../host/projection_sm100.hpp"
#include "../../kernels/up_projection_dgrad_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor>
cudaError_t launch(UpProjectionDgradArguments const& args, int sm_count, cudaStream_t stream) {
  using One = UpProjectionDgradSm100<kMajor>;
  using Pair = UpProjectionDgradSm100Pair<kMajor>;
  return takes_pairs_sm100(args.rows, args.experts, sm_count)
             ? launch_up_projection_dgrad_sm100<Pair>(args, sm_count, stream)
             : launch_up_projection_dgrad_sm100<One>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_up_projection_dgrad_sm100(UpProjectionDgradArguments const& args, int sm_count,
                                             cudaStream_t stream) {
  return args.w_up[0].column_stride == 1 ? launch<gemm::Major::kRows>(args, sm_count, stream)
                                         : launch<gemm::Major::kK>(args, sm_count, stream);
}

}  // namespace tessera::cuda
