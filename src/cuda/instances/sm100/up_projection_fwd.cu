// SPDX-License-Identifier: Apache-2.0
#include "../../host/projection_sm100.hpp"
#include "../../kernels/up_projection_fwd_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor>
cudaError_t launch(UpProjectionFwdArguments const& args, int sm_count, cudaStream_t stream) {
  constexpr ActivationKind kKind = ActivationKind::swiglu;
  using One = UpProjectionFwdSm100<kKind, kMajor>;
  using Pair = UpProjectionFwdSm100Pair<kKind, kMajor>;
  using Gathered = UpProjectionFwdSm100Gathered<kKind, kMajor>;
  using GatheredPair = UpProjectionFwdSm100GatheredPair<kKind, kMajor>;
  if (args.activation.kind != kKind) return cudaErrorInvalidValue;
  bool const pairs = takes_pairs_sm100(args.rows, args.experts, sm_count);
  if (args.gmem_gather_index != nullptr) {
    return pairs ? launch_up_projection_fwd_sm100<GatheredPair>(args, sm_count, stream)
                 : launch_up_projection_fwd_sm100<Gathered>(args, sm_count, stream);
  }
  return pairs ? launch_up_projection_fwd_sm100<Pair>(args, sm_count, stream)
               : launch_up_projection_fwd_sm100<One>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_up_projection_fwd_sm100(UpProjectionFwdArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  return args.w_up[0].column_stride == 1 ? launch<gemm::Major::kK>(args, sm_count, stream)
                                         : launch<gemm::Major::kRows>(args, sm_count, stream);
}

}  // namespace tessera::cuda
