// SPDX-License-Identifier: Apache-2.0
#include "../kernels/choose_tokens.cuh"
#include "../kernels/choose_tokens_emit.cuh"
#include "../kernels/mask_ranks.cuh"
#include "../kernels/rank_pairs.cuh"

namespace tessera::cuda {

cudaError_t launch_choose_tokens(ChooseTokensArguments const& args, cudaStream_t stream) {
  cudaError_t error =
      args.has_ranks ? cudaSuccess : launch_rank_pairs_config<RankPairsConfig>(args, stream);
  if (error == cudaSuccess && args.gmem_token_mask != nullptr) {
    error = launch_mask_ranks_config<RankPairsConfig>(args, stream);
  }
  if (error == cudaSuccess) {
    error = launch_choose_tokens_keep_config<ChooseTokensConfig>(args, stream);
  }
  if (error == cudaSuccess && emit_needs_scan<EmitTokensConfig>(args)) {
    error = launch_choose_tokens_scan_config<ChooseTokensConfig>(args, stream);
  }
  return error == cudaSuccess ? launch_choose_tokens_emit_config<EmitTokensConfig>(args, stream)
                              : error;
}

}  // namespace tessera::cuda
