// SPDX-License-Identifier: Apache-2.0
// mask_ranks: takes padding out of what rank_pairs or route_and_rank leaves: its pairs get no rank, and its slots do
//             not count.
// Shapes   mask (T), ranks (E,T), slots of each block of 32 tokens, and of each block and expert the ends of the ranks
// Work     reads T and, of each block with padding, 128E; writes 4E of every token of padding and 32E of such a block
// Schedule a CTA per 32 tokens, two threads for each expert, which do nothing where no token is padding
// Numerics integers; bitwise repeatable: yes
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/launch.hpp"
#include "../router/block_ranks.cuh"

namespace tessera::cuda {

template <class Config>
__global__ void __launch_bounds__(Config::kCtaWarps* arch::kWarpThreads)
    mask_ranks(__grid_constant__ ChooseTokensArguments const p) {
  static_assert(kChoiceBlockTokens == arch::kWarpThreads, "a lane per token");
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  int64_t const first = int64_t{blockIdx.x} * kChoiceBlockTokens, own = first + arch::lane_idx();
  auto const tokens = static_cast<int>(min(p.tokens - first, int64_t{kChoiceBlockTokens}));
  uint32_t const real =
      __ballot_sync(arch::kAllLanes, own < p.tokens && p.gmem_token_mask[own] != 0);
  if (threadIdx.x == 0) {
    workspace.gmem_block_slots[blockIdx.x] =
        p.gmem_topk_ids != nullptr ? __popc(real) * p.top_k : 0;
  }
  if (__popc(real) == tokens) return;
  for_each_half_block<Config::kCtaWarps * arch::kWarpThreads>(
      p.experts, [&](int e, int begin, bool exists) {
        HalfBlockRanks ranks;
        uint32_t* const gmem_half = workspace.gmem_ranks + e * p.tokens + first + begin;
        for (int t = HalfBlockRanks::kTokens - 1; t >= 0; --t) {
          bool const there = exists && begin + t < tokens, stays = there && real >> (begin + t) & 1;
          ranks.add(stays ? gmem_half[t] : 0);
          if (there && !stays) gmem_half[t] = 0;
        }
        ranks.store(workspace.gmem_block_ranks + e * int64_t{gridDim.x} + blockIdx.x, exists);
      });
}

template <class Config>
cudaError_t launch_mask_ranks_config(ChooseTokensArguments const& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  return host::launch_early(mask_ranks<Config>, false,
                            static_cast<unsigned>(choice_blocks(args.tokens)),
                            Config::kCtaWarps * arch::kWarpThreads, 0, stream, args);
}

}  // namespace tessera::cuda
