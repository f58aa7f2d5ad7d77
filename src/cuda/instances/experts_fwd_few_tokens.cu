// SPDX-License-Identifier: Apache-2.0
#include "../kernels/experts_fwd_few_tokens.cuh"

namespace tessera::cuda {

cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sm_count,
                                          cudaStream_t stream) {
  int64_t const blocks = few_tokens_blocks(args.down.rows, args.down.experts);
  return blocks <= ExpertsFwdOneOrTwo::kMostBlocks &&
                 args.up.hidden <= ExpertsFwdOneOrTwo::kLongestRows
             ? launch_experts_fwd_few_tokens_config<ExpertsFwdOneOrTwo>(args, sm_count, stream)
             : launch_experts_fwd_few_tokens_config<ExpertsFwdFewTokens>(args, sm_count, stream);
}

}  // namespace tessera::cuda
