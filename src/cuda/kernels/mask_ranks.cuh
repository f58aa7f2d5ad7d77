// SPDX-License-Identifier: Apache-2.0
// mask_ranks: takes padding out of what rank_pairs leaves: its pairs get no rank, and its slots do not count.
// Shapes   mask (T), ranks (E,T), slots of each block of 32 tokens
// Work     reads T, writes 4E of every token of padding
// Schedule a CTA per 32 tokens, a lane per token; a warp has every kCtaWarps-th expert
// Numerics integers; bitwise repeatable: yes
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/launch.hpp"

namespace tessera::cuda {

template <class Config>
__global__ void __launch_bounds__(Config::kCtaWarps* arch::kWarpThreads)
    mask_ranks(__grid_constant__ ChooseTokensArguments const p) {
  static_assert(kChoiceBlockTokens == arch::kWarpThreads, "a lane per token");
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  int64_t const token = int64_t{blockIdx.x} * kChoiceBlockTokens + arch::lane_idx();
  bool const exists = token < p.tokens, real = exists && p.gmem_token_mask[token] != 0;
  int const warp = arch::warp_idx();  // a shuffle of all lanes, some of which return below
  int const in_block = __popc(__ballot_sync(arch::kAllLanes, real));
  if (threadIdx.x == 0) {
    workspace.gmem_block_slots[blockIdx.x] = p.gmem_topk_ids != nullptr ? in_block * p.top_k : 0;
  }
  if (real || !exists) return;
  for (int e = warp; e < p.experts; e += Config::kCtaWarps) {
    workspace.gmem_ranks[e * p.tokens + token] = 0;
  }
}

template <class Config>
cudaError_t launch_mask_ranks_config(ChooseTokensArguments const& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  return host::launch_early(mask_ranks<Config>, false,
                            static_cast<unsigned>(choice_blocks(args.tokens)),
                            Config::kCtaWarps * arch::kWarpThreads, 0, stream, args);
}

}  // namespace tessera::cuda
