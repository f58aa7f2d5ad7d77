// SPDX-License-Identifier: Apache-2.0
#include "../../host/projection_sm100.hpp"
#include "../../kernels/down_projection_dgrad_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor>
cudaError_t launch(DownProjectionDgradArguments const& args, int sm_count, cudaStream_t stream) {
  constexpr ActivationKind kKind = ActivationKind::swiglu;
  using One = DownProjectionDgradSm100<kKind, kMajor>;
  using Pair = DownProjectionDgradSm100Pair<kKind, kMajor>;
  return takes_pairs_sm100(args.rows, args.experts, sm_count)
             ? launch_down_projection_dgrad_sm100<Pair>(args, sm_count, stream)
             : launch_down_projection_dgrad_sm100<One>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_down_projection_dgrad_sm100(DownProjectionDgradArguments const& args,
                                               int sm_count, cudaStream_t stream) {
  return args.w_down.column_stride == 1 ? launch<gemm::Major::kRows>(args, sm_count, stream)
                                        : launch<gemm::Major::kK>(args, sm_count, stream);
}

}  // namespace tessera::cuda
