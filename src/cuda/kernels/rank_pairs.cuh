// SPDX-License-Identifier: Apache-2.0
// rank_pairs: the rank (core::pair_rank) of every pair (token, expert), by which choose_tokens chooses: p of the
// expert, and for members of the top-k choice their score, above all others.
// Shapes   logits (T,E), member ids and scores (T,K); ranks (E,T), slots of each block of 32 tokens, and of each block
//          and expert the ends of the ranks
// Work     reads 4TE + 8TK, writes 5TE
// Schedule a CTA per 32 tokens, a warp per token: p of all experts, then the members' scores; transposed through shared
//          memory, so that an expert's ranks lie side by side. The blocks' slots are those of all members.
//          A softmax over up to 512 experts stays in registers, kValues a lane, and ends in exact quotients without a
//          division each; a token whose logits are further apart than 60, or NaN, goes the way of other routers
//          With a mask mask_ranks (kernels/mask_ranks.cuh) then takes padding out of both
// Numerics fp32, compiled without contraction, sums fold 32 lanes by halves: the bits of the CPU
// Requires groups <= 32
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/launch.hpp"
#include "../router/block_ranks.cuh"
#include "../router/pair_ranks.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RankPairsConfig {
  static constexpr int kCtaWarps = 8;
  static constexpr int kMaxStaged = 1024;  // experts whose ranks pass through shared memory
  // On an SM. With the most values shared memory holds no more.
  static constexpr int ctas(int values) { return values < kMaxValues ? 6 : 3; }
  static constexpr int kMinValues = 2, kMaxValues = 16;  // of a token in a lane's registers
  static constexpr int kMaxGroups = arch::kWarpThreads;
};

// kValues: of a token in a lane's registers, where its p is a softmax over all experts; 0 for other routers. kWhole:
// every lane has so many.
template <class Config, int kValues, bool kWhole>
__global__ void __launch_bounds__(Config::kCtaWarps* arch::kWarpThreads, Config::ctas(kValues))
    rank_pairs(__grid_constant__ ChooseTokensArguments const p) {
  arch::let_next_kernel_start();
  constexpr int kThreads = Config::kCtaWarps * arch::kWarpThreads;
  TESSERA_DYNAMIC_SHARED_ARRAY(uint32_t, smem_ranks);  // (E, kRankPitch)
  arch::wait_for_previous_kernel();
  uint32_t* const gmem_ranks = ChoiceWorkspace::of(p).gmem_ranks;
  int const first = static_cast<int>(blockIdx.x) * kChoiceBlockTokens, warp = arch::warp_idx();
  auto const tokens = min(static_cast<int>(p.tokens) - first, kChoiceBlockTokens);
  bool const staged = kValues > 0 || p.experts <= Config::kMaxStaged;
  for (int i = warp; i < tokens; i += Config::kCtaWarps) {
    if (staged) {
      RankedToken{p, first + i, smem_ranks + i, kRankPitch}.template rank<kValues, kWhole>();
    } else {
      RankedToken{p, first + i, gmem_ranks + first + i, p.tokens}.template rank<0, false>();
    }
  }
  if (threadIdx.x == 0) {
    int const members = p.gmem_topk_ids != nullptr ? p.top_k : 0;
    ChoiceWorkspace::of(p).gmem_block_slots[blockIdx.x] = tokens * members;
  }
  __syncthreads();
  int const experts = kWhole ? kValues * arch::kWarpThreads : p.experts;
  if (staged) return store_block_ranks<kThreads>(p, experts, tokens, smem_ranks);
  BlockRanks* const gmem_blocks = ChoiceWorkspace::of(p).gmem_block_ranks + blockIdx.x;
  for_each_half_block<kThreads>(experts, [&](int e, int begin, bool exists) {
    HalfBlockRanks ranks;
    uint32_t const* const gmem_half = gmem_ranks + min(e, experts - 1) * p.tokens + first + begin;
    for (int t = HalfBlockRanks::kTokens - 1; t >= 0; --t) {
      ranks.add(begin + t < tokens ? gmem_half[t] : 0);
    }
    ranks.store(gmem_blocks + e * int64_t{gridDim.x}, exists);
  });
}

template <auto kKernel, class Config>
cudaError_t launch_ranking(ChooseTokensArguments const& args, cudaStream_t stream) {
  constexpr int kMaxShared = Config::kMaxStaged * kRankPitch * 4;
  cudaError_t const error = host::allow_shared_memory<kKernel>(kMaxShared);
  if (error != cudaSuccess) return error;
  int64_t const blocks = choice_blocks(args.tokens);
  if (blocks == 0) return cudaSuccess;
  int const staged = args.experts <= Config::kMaxStaged ? args.experts : 0;
  auto const smem_bytes = static_cast<size_t>(staged) * kRankPitch * 4;
  return host::launch_early(kKernel, true, static_cast<unsigned>(blocks),
                            Config::kCtaWarps * arch::kWarpThreads, smem_bytes, stream, args);
}

// With the fewest registers that hold a token's experts.
template <class Config, int kValues>
cudaError_t launch_rank_pairs_values(ChooseTokensArguments const& args, cudaStream_t stream) {
  constexpr int kMost = kValues * arch::kWarpThreads;
  if constexpr (kValues > 0) {
    if (args.experts > kMost) {
      constexpr int kMore = kValues < Config::kMaxValues ? 2 * kValues : 0;
      return launch_rank_pairs_values<Config, kMore>(args, stream);
    }
    if (args.experts == kMost)
      return launch_ranking<rank_pairs<Config, kValues, true>, Config>(args, stream);
  }
  return launch_ranking<rank_pairs<Config, kValues, false>, Config>(args, stream);
}

template <class Config>
cudaError_t launch_rank_pairs_config(ChooseTokensArguments const& args, cudaStream_t stream) {
  if (args.groups > Config::kMaxGroups || args.slots > INT32_MAX || args.experts < 1) {
    return cudaErrorInvalidValue;
  }
  return core::has_own_p(args.router.kind)
             ? launch_rank_pairs_values<Config, 0>(args, stream)
             : launch_rank_pairs_values<Config, Config::kMinValues>(args, stream);
}

}  // namespace tessera::cuda
