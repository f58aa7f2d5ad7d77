// SPDX-License-Identifier: Apache-2.0
// route_and_rank: route and rank_pairs in one, for routers whose choice ranks by its scores and all other pairs by a
//                 softmax over all experts: I_t, its scores with c = 1, and the rank of every pair.
// Shapes   logits (T,E) fp32; topk_ids, topk_weights (T,K); ranks (E,T), slots of each block of 32 tokens, and of each
//          block and expert the ends of the ranks
// Work     reads 4TE, writes 8TK + 5TE
// Schedule a CTA per 32 tokens; kLanes lanes a token, four experts in turn each, so that a lane has all terms of some
//          of the 32 partial sums of a softmax
//   choose  as route_shared (kernels/route.cuh)
//   rank    logits once more, now out of L1: largest, terms, sum, quotients; into shared memory, transposed. A token
//           whose logits are further apart than 60, or NaN: by the whole warp, as rank_pairs does
//   members their scores over it; then the block's ranks and their ends leave
// Numerics fp32, compiled without contraction, sums fold 32 partial sums by halves: the bits of route and rank_pairs
// Requires what serves_route_and_rank() asks
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/launch.hpp"
#include "../host/route.hpp"
#include "../router/choice.cuh"
#include "../router/pair_ranks.cuh"
#include "core/fp32_math.hpp"
#include "core/token_rounding.hpp"

namespace tessera::cuda {

struct RouteAndRankConfig {
  static constexpr int kMaxLanes = 8;  // of a token; as many warps have the tokens of a CTA
  static constexpr int kMaxValues = 32;
  static constexpr int kSmWarps = 24;  // that an SM is to hold, at 80 registers a thread
  static constexpr int kMaxTopK = SharedToken<kMaxLanes, kMaxValues>::kChoices * kMaxLanes;
  static constexpr int kMaxExperts = SharedToken<kMaxLanes, kMaxValues>::kExperts;
};

// A softmax over all experts of a token, by the kLanes lanes that share it.
template <int kLanes, int kValues>
struct SharedSoftmax {
  using Token = SharedToken<kLanes, kValues>;
  // Partial sum e of the 32 of a softmax has every 32nd expert from e on. A lane has kParts of these sums whole: its
  // value i belongs to number i % kParts of them.
  static constexpr int kParts = arch::kWarpThreads / kLanes;
  static_assert(kParts % 4 == 0);

  // Adds up partial sums by halves 16, 8, 4, 2, 1: some have their other half in this lane, some in another one.
  __device__ __forceinline__ static float fold(float (&part)[kParts]) {
    TESSERA_UNROLL
    for (int half = kParts / 2; half >= 4; half /= 2) {
      TESSERA_UNROLL
      for (int i = 0; i < half; ++i) part[i] += part[i + half];
    }
    TESSERA_UNROLL
    for (int half = kLanes / 2; half > 0; half /= 2) {
      TESSERA_UNROLL
      for (int i = 0; i < 4; ++i) part[i] += __shfl_xor_sync(arch::kAllLanes, part[i], half);
    }
    return (part[0] + part[2]) + (part[1] + part[3]);
  }

  // Writes the ranks to smem_column, kRankPitch apart; returns whether they are right, which those of terms that may be
  // too small are not.
  __device__ __forceinline__ static bool rank(int experts, float const* gmem_logits,
                                              uint32_t* smem_column) {
    float value[kValues], own = -INFINITY;
    Token::load_logits(experts, gmem_logits, -INFINITY, value);
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) own = fmaxf(own, value[i]);
    float const largest = core::key_value(largest_of<kLanes>(core::ordered_key(own)));
    bool fits = true;
    float part[kParts] = {};
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      bool const exists = Token::expert(i) < experts;
      float const above = exists ? value[i] - largest : 0.0f;
      fits &= above >= kLeastBelowLargest;  // not of NaN, and not where the largest is infinite
      value[i] = core::exp_fp32_of_normal(above);
      part[i % kParts] += exists ? value[i] : 0.0f;
    }
    core::DivisionBy const sum(fold(part));
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      uint32_t const rank = rank_of_term(sum, value[i]);
      if (Token::expert(i) < experts) smem_column[Token::expert(i) * kRankPitch] = rank;
    }
    return fits;
  }
};

template <class Config, int kLanes, int kValues>
__global__ void TESSERA_LAUNCH_BOUNDS_CTAS(kLanes* arch::kWarpThreads, Config::kSmWarps / kLanes)
    route_and_rank(__grid_constant__ RouteArguments const args,
                   __grid_constant__ ChooseTokensArguments const choice_args) {
  using Token = SharedToken<kLanes, kValues>;
  constexpr uint32_t kTokenLanes = (1u << kLanes) - 1;
  arch::let_next_kernel_start();
  TESSERA_DYNAMIC_SHARED_ARRAY(uint32_t, smem_ranks);  // (E, kRankPitch)
  arch::wait_for_previous_kernel();
  RouteArguments p = args;
  p.gmem_selection_bias = nullptr;  // as serves_route_and_rank() asks: no code for it
  int64_t const first = int64_t{blockIdx.x} * kChoiceBlockTokens;
  auto const tokens = static_cast<int>(min(p.tokens - first, int64_t{kChoiceBlockTokens}));
  int const in_cta = static_cast<int>(threadIdx.x) / kLanes;
  int const of_warp = in_cta - arch::lane_idx() / kLanes;  // the warp's first
  // Lanes without a token have the last one once more, and store nothing of it.
  bool const exists = in_cta < tokens;
  int64_t const token = first + min(in_cta, tokens - 1);
  float const* const gmem_logits = p.gmem_logits + token * p.experts;
  int choice[Token::kChoices] = {};
  Token::choose(p, false, first + of_warp, gmem_logits, choice);
  uint32_t* const smem_column = smem_ranks + in_cta;
  bool const is_right =
      SharedSoftmax<kLanes, kValues>::rank(p.experts, gmem_logits, smem_column) || !exists;
  uint32_t wrong = __ballot_sync(arch::kAllLanes, !is_right);
  __syncwarp();  // other lanes write the ranks that are put right
  while (wrong != 0) {
    int const in_warp = (__ffs(static_cast<int>(wrong)) - 1) / kLanes, of_cta = of_warp + in_warp;
    wrong &= ~(kTokenLanes << in_warp * kLanes);
    RankedToken{choice_args, static_cast<int32_t>(first) + of_cta, smem_ranks + of_cta, kRankPitch}
        .rank_others();
  }
  int64_t const slot = token * p.top_k + Token::lane();
  bool chosen[Token::kChoices];
  float logit[Token::kChoices];
  TESSERA_UNROLL
  for (int c = 0; c < Token::kChoices; ++c) {
    chosen[c] = exists && Token::lane() + c * kLanes < p.top_k;
    logit[c] = chosen[c] ? gmem_logits[choice[c]] : 0.0f;
    if (chosen[c]) p.gmem_topk_ids[slot + c * kLanes] = choice[c];
  }
  auto const scores =
      store_scores<kLanes, Token::kChoices, kValues>(p, false, gmem_logits, logit, chosen, slot);
  __syncwarp();
  TESSERA_UNROLL
  for (int c = 0; c < Token::kChoices; ++c) {
    if (chosen[c]) smem_column[choice[c] * kRankPitch] = core::pair_rank(true, scores.value[c]);
  }
  if (threadIdx.x == 0) {
    ChoiceWorkspace::of(choice_args).gmem_block_slots[blockIdx.x] = tokens * p.top_k;
  }
  __syncthreads();
  store_block_ranks<kLanes * arch::kWarpThreads>(choice_args, p.experts, tokens, smem_ranks);
}

template <class Config>
bool serves_route_and_rank(RouteArguments const& args) {
  return shares_warps(args) && !core::has_own_p(args.kind) && args.gmem_selection_bias == nullptr &&
         args.experts <= Config::kMaxExperts && args.top_k <= Config::kMaxTopK;
}

// With the fewest lanes that hold the experts and the choices.
template <class Config, int kLanes, int kValues>
cudaError_t launch_route_and_rank_lanes(RouteArguments const& route,
                                        ChooseTokensArguments const& choice, cudaStream_t stream) {
  using Token = SharedToken<kLanes, kValues>;
  if constexpr (kLanes < Config::kMaxLanes) {
    bool const takes_more = route.top_k > Token::kChoices * kLanes ||
                            (kValues == Config::kMaxValues && route.experts > Token::kExperts);
    if (takes_more) {
      return launch_route_and_rank_lanes<Config, 2 * kLanes, kValues>(route, choice, stream);
    }
  }
  if constexpr (kValues < Config::kMaxValues) {
    if (route.experts > Token::kExperts) {
      return launch_route_and_rank_lanes<Config, kLanes, 2 * kValues>(route, choice, stream);
    }
  }
  constexpr int kMaxShared = Token::kExperts * kRankPitch * 4;
  cudaError_t const error =
      host::allow_shared_memory<route_and_rank<Config, kLanes, kValues>>(kMaxShared);
  if (error != cudaSuccess || route.tokens == 0) return error;
  return host::launch_early(
      route_and_rank<Config, kLanes, kValues>, true,
      static_cast<unsigned>(choice_blocks(route.tokens)), kLanes * arch::kWarpThreads,
      static_cast<size_t>(route.experts) * kRankPitch * 4, stream, route, choice);
}

template <class Config>
cudaError_t launch_route_and_rank_config(RouteArguments const& route,
                                         ChooseTokensArguments const& choice, cudaStream_t stream) {
  if (!serves_route_and_rank<Config>(route) || choice.slots > INT32_MAX || route.top_k < 1) {
    return cudaErrorInvalidValue;
  }
  return launch_route_and_rank_lanes<Config, 4, 8>(route, choice, stream);
}

}  // namespace tessera::cuda
