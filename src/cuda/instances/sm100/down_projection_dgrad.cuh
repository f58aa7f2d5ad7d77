// SPDX-License-Identifier: Apache-2.0
// The instances of down_projection_dgrad of sm_100a for one activation, chosen by the weights' order and by the rows of
// each expert.
#pragma once

#include "../../kernels/down_projection_dgrad_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {

template <ActivationKind kKind, gemm::Major kMajor>
cudaError_t launch_down_projection_dgrad_sm100_of(DownProjectionDgradArguments const& args,
                                                  int sm_count, cudaStream_t stream) {
  using One = DownProjectionDgradSm100<kKind, kMajor>;
  using Pair = DownProjectionDgradSm100Pair<kKind, kMajor>;
  return takes_pairs_sm100(args.rows, args.experts, sm_count)
             ? launch_down_projection_dgrad_sm100<Pair>(args, sm_count, stream)
             : launch_down_projection_dgrad_sm100<One>(args, sm_count, stream);
}

template <ActivationKind kKind>
cudaError_t launch_down_projection_dgrad_sm100_of(DownProjectionDgradArguments const& args,
                                                  int sm_count, cudaStream_t stream) {
  using enum gemm::Major;
  return args.w_down.column_stride == 1
             ? launch_down_projection_dgrad_sm100_of<kKind, kRows>(args, sm_count, stream)
             : launch_down_projection_dgrad_sm100_of<kKind, kK>(args, sm_count, stream);
}

}  // namespace tessera::cuda
