// SPDX-License-Identifier: Apache-2.0
// The instances of up_projection_fwd of sm_100a for one activation, chosen by the weights' order and by the rows of
// each expert. Rows in the order of experts are gathered as well, but for swiglu, which has kernels that load by TMA.
#pragma once

#include "../../kernels/up_projection_fwd_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {

template <ActivationKind kKind, gemm::Major kMajor>
cudaError_t launch_up_projection_fwd_sm100_of(UpProjectionFwdArguments const& args, int sm_count,
                                              cudaStream_t stream) {
  bool const pairs = takes_pairs_sm100(args.rows, args.experts, sm_count);
  if constexpr (kKind == ActivationKind::swiglu) {
    if (args.gmem_gather_index == nullptr) {
      using One = UpProjectionFwdSm100<kKind, kMajor>;
      using Pair = UpProjectionFwdSm100Pair<kKind, kMajor>;
      return pairs ? launch_up_projection_fwd_sm100<Pair>(args, sm_count, stream)
                   : launch_up_projection_fwd_sm100<One>(args, sm_count, stream);
    }
  }
  using One = UpProjectionFwdSm100Gathered<kKind, kMajor>;
  using Pair = UpProjectionFwdSm100GatheredPair<kKind, kMajor>;
  return pairs ? launch_up_projection_fwd_sm100<Pair>(args, sm_count, stream)
               : launch_up_projection_fwd_sm100<One>(args, sm_count, stream);
}

template <ActivationKind kKind>
cudaError_t launch_up_projection_fwd_sm100_of(UpProjectionFwdArguments const& args, int sm_count,
                                              cudaStream_t stream) {
  using enum gemm::Major;
  return args.w_up[0].column_stride == 1
             ? launch_up_projection_fwd_sm100_of<kKind, kK>(args, sm_count, stream)
             : launch_up_projection_fwd_sm100_of<kKind, kRows>(args, sm_count, stream);
}

}  // namespace tessera::cuda
