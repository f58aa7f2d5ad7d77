// SPDX-License-Identifier: Apache-2.0
#include "../kernels/experts_fwd_few_tokens.cuh"

namespace tessera::cuda {

cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sm_count,
                                          cudaStream_t stream) {
  int64_t const blocks = args.has_up ? few_tokens_blocks(args.up.rows, args.up.experts)
                                     : few_tokens_blocks(args.down.rows, args.down.experts);
  int64_t const hidden = args.has_up ? args.up.hidden : args.down.hidden;
  return blocks <= ExpertsFwdOneOrTwo::kMostBlocks && hidden <= ExpertsFwdOneOrTwo::kMostHidden
             ? launch_experts_fwd_few_tokens_config<ExpertsFwdOneOrTwo>(args, sm_count, stream)
             : launch_experts_fwd_few_tokens_config<ExpertsFwdFewTokens>(args, sm_count, stream);
}

cudaError_t launch_up_projection_fwd_few_tokens(UpProjectionFwdArguments const& args, int sm_count,
                                                cudaStream_t stream) {
  return launch_experts_fwd_few_tokens({.up = args,
                                        .down = {},
                                        .aggregate = {},
                                        .has_up = true,
                                        .has_down = false,
                                        .has_aggregate = false,
                                        .gmem_ticket = args.gmem_tile_counter,
                                        .gmem_words = nullptr},
                                       sm_count, stream);
}

}  // namespace tessera::cuda
