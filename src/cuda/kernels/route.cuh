// SPDX-License-Identifier: Apache-2.0
// route: I_t = the K largest keys of token t, ties to the lower expert, NaN above all; then the scores
//        (formulas: cpu/parallel/router_formula.hpp; the same fp32 operations in the same order).
// Shapes   logits (T,E) fp32; topk_ids, topk_weights, chosen_p (T,K)
// Work     reads 4TE, writes 8TK (12TK); per token K warp maxima over E/32 keys a lane; memory bound for small K
// Schedule route_shared, usual routers up to 512 experts, rows of logits on 16 bytes: kLanes lanes a token, which hold
//          its keys as ordered integers, the last bits replaced by the expert
//   select  every lane sorts its eight largest; K times: maximum of the token's lanes, whose lane moves up its next.
//           Keys that differ in those bits alone, or a ninth of one lane: that token by the whole warp, as below
//   score   lane q has choices q and q + kLanes
//   rank    where metadata wants it: slots among those of an expert and the CTA's 32 tokens (warp/unit_ranks.cuh)
//          route, the others: a warp per token; lane l holds experts l, 32+l, 64+l, .. as ordered integers
//   select  every lane sorts its four largest keys; K times: maximum of the warp, whose lane moves up its next. Equal
//           keys, or a fifth of one lane: once more, step by step, with experts beside the keys
//   score   lane k holds the k-th choice; sums over the chosen are one butterfly, over all E first per lane
//          Both start beside the end of the kernel before and let metadata start at once. Where route_shared ranks,
//          metadata waits until all of its CTAs have ended, or it would crowd on the SMs that are free first
//          (docs/adr/0037-early-launches-in-forward.md)
// Numerics fp32, compiled without contraction; sums fold 32 lanes by halves: the bits of core::warp_sum
// Requires E <= 1024, K <= 32
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/metadata.hpp"
#include "../host/route.hpp"
#include "../router/choice.cuh"
#include "../warp/unit_ranks.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouteConfig {
  static constexpr int kWarps = 8;
  static constexpr int kSharedWarps = 4;  // of route_shared
  static constexpr int kMaxExperts = 1024;
  static constexpr int kMaxTopK = arch::kWarpThreads;
  static constexpr int kMaxGroups = arch::kWarpThreads;
  // route_shared ranks up to these bounds: a lane of four has so many of a token's choices and experts.
  static constexpr int kMaxRankedExperts = 128;
  static constexpr int kMaxRankedTopK = 8;
  static constexpr int64_t kMaxCountBytes = 1
                                            << 19;  // read by every eight CTAs of metadata_scatter
};

template <class Config, int kValues>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    route(__grid_constant__ RouteArguments const p) {
  arch::let_next_kernel_start();  // metadata
  arch::wait_for_previous_kernel();
  int64_t const token = int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx();
  if (token >= p.tokens) return;
  float const* const gmem_logits = p.gmem_logits + token * p.experts;
  bool const has_own_p = core::has_own_p(p.kind);
  TokenKeys<kValues> keys;
  keys.load(p, has_own_p, gmem_logits);
  if (p.kind == RouterKind::group_limited) keys.mask_groups(p);
  int const choice = keys.choose(p.top_k);
  int64_t const slot = token * p.top_k + arch::lane_idx();
  bool const chosen = arch::lane_idx() < p.top_k;
  if (chosen) p.gmem_topk_ids[slot] = choice;
  store_scores<arch::kWarpThreads, 1, kValues>(
      p, has_own_p, gmem_logits, {chosen ? gmem_logits[choice] : 0.0f}, {chosen}, slot);
}

// kHasOwnP: every warp runs through this code once, and of 6200 instructions at 32 values a lane 4000 are p of its own.
template <class Config, int kLanes, int kValues, bool kHasOwnP, bool kRanks = false>
__global__ void TESSERA_LAUNCH_BOUNDS(Config::kSharedWarps* arch::kWarpThreads)
    route_shared(__grid_constant__ RouteArguments const p) {
  using Token = SharedToken<kLanes, kValues>;
  constexpr int kTokens = arch::kWarpThreads / kLanes;
  if constexpr (!kRanks) arch::let_next_kernel_start();  // metadata
  int64_t const first = (int64_t{blockIdx.x} * Config::kSharedWarps + arch::warp_idx()) * kTokens;
  // Warps without a token go through the last one again where others wait for them.
  if (!kRanks && first >= p.tokens) return;
  TESSERA_STATIC_SHARED(smem_tokens, uint32_t[kRanks ? Config::kMaxRankedExperts : 1]);
  warp::UnitRanks ranks(smem_tokens);
  if constexpr (kRanks) {
    static_assert(Config::kSharedWarps * kTokens == kRankedTokens);
    static_assert(Config::kSharedWarps * arch::kWarpThreads == Config::kMaxRankedExperts);
    ranks.clear();
  }
  arch::wait_for_previous_kernel();
  int64_t const token = min(first + arch::lane_idx() / kLanes, p.tokens - 1);
  float const* const gmem_logits = p.gmem_logits + token * p.experts;
  int choice[Token::kChoices] = {};
  Token::choose(p, kHasOwnP, first, gmem_logits, choice);
  // Lanes of the last token again, where the warp has more than exist, store nothing.
  bool const exists = first + arch::lane_idx() / kLanes < p.tokens;
  int64_t const slot = token * p.top_k + Token::lane();
  int const in_cta = arch::warp_idx() * kTokens + arch::lane_idx() / kLanes;
  bool chosen[Token::kChoices];
  float logit[Token::kChoices];
  if constexpr (kRanks) __syncthreads();
  TESSERA_UNROLL
  for (int c = 0; c < Token::kChoices; ++c) {
    chosen[c] = exists && Token::lane() + c * kLanes < p.top_k;
    logit[c] = chosen[c] ? gmem_logits[choice[c]] : 0.0f;
    if (chosen[c]) p.gmem_topk_ids[slot + c * kLanes] = choice[c];
    if constexpr (kRanks) {
      if (chosen[c]) ranks.note(in_cta, choice[c]);
    }
  }
  store_scores<kLanes, Token::kChoices, kValues>(p, kHasOwnP, gmem_logits, logit, chosen, slot);
  if constexpr (kRanks) {
    __syncthreads();
    TESSERA_UNROLL
    for (int c = 0; c < Token::kChoices; ++c) {
      if (!chosen[c]) continue;
      p.gmem_unit_ranks[slot + c * kLanes] = static_cast<uint16_t>(ranks.rank(in_cta, choice[c]));
    }
    auto const pitch = static_cast<int>(MetadataWorkspace::pitch_of(p.experts));
    ranks.store_counts(p.gmem_unit_counts + int64_t{blockIdx.x} * pitch, pitch);
  }
}

// With the fewest lanes that hold the experts and the choices.
template <class Config, int kLanes, int kValues>
cudaError_t launch_route_shared(RouteArguments const& args, cudaStream_t stream) {
  using Token = SharedToken<kLanes, kValues>;
  if (args.top_k > Token::kChoices * kLanes) {
    if constexpr (kLanes < 16) {
      return launch_route_shared<Config, 2 * kLanes, kValues>(args, stream);
    }
  }
  if (args.experts > Token::kExperts) {
    if constexpr (kValues < 32) {
      return launch_route_shared<Config, kLanes, 2 * kValues>(args, stream);
    } else if constexpr (kLanes < 16) {
      return launch_route_shared<Config, 2 * kLanes, kValues>(args, stream);
    }
  }
  constexpr int kCtaTokens = Config::kSharedWarps * arch::kWarpThreads / kLanes;
  int64_t const ctas = (args.tokens + kCtaTokens - 1) / kCtaTokens;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  bool const has_own_p = core::has_own_p(args.kind);
  auto* kernel = has_own_p ? route_shared<Config, kLanes, kValues, true>
                           : route_shared<Config, kLanes, kValues, false>;
  if constexpr (kCtaTokens == kRankedTokens) {
    if (args.gmem_unit_ranks != nullptr) {
      kernel = has_own_p ? route_shared<Config, kLanes, kValues, true, true>
                         : route_shared<Config, kLanes, kValues, false, true>;
    }
  }
  return host::launch_early(kernel, true, static_cast<unsigned>(ctas),
                            Config::kSharedWarps * arch::kWarpThreads, 0, stream, args);
}

template <class Config>
int32_t unit_slots_of(RouteArguments const& args) {
  if (!shares_warps(args) || args.experts > Config::kMaxRankedExperts || args.top_k < 2 ||
      args.top_k > Config::kMaxRankedTopK) {
    return 0;
  }
  int32_t const slots = kRankedTokens * args.top_k;
  RankUnits const ranked(slots);
  int64_t const all_slots = args.tokens * args.top_k;
  int64_t const count_bytes = ranked.units(all_slots) * MetadataWorkspace::pitch_of(args.experts) *
                              int64_t{sizeof(uint16_t)};
  return ranked.blocks(all_slots) > 1 && count_bytes <= Config::kMaxCountBytes ? slots : 0;
}

template <class Config, int kValues>
cudaError_t launch_route_values(RouteArguments const& args, cudaStream_t stream) {
  if (args.experts > kValues * arch::kWarpThreads) {
    if constexpr (kValues * arch::kWarpThreads < Config::kMaxExperts) {
      return launch_route_values<Config, 2 * kValues>(args, stream);
    }
    return cudaErrorInvalidValue;
  }
  int64_t const ctas = (args.tokens + Config::kWarps - 1) / Config::kWarps;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  return host::launch_early(route<Config, kValues>, true, static_cast<unsigned>(ctas),
                            Config::kWarps * arch::kWarpThreads, 0, stream, args);
}

template <class Config>
cudaError_t launch_route_config(RouteArguments const& args, cudaStream_t stream) {
  bool const groups_fit = args.kind != RouterKind::group_limited ||
                          (args.groups >= 1 && args.groups <= Config::kMaxGroups);
  if (args.kind == RouterKind::given || args.kind == RouterKind::expert_choice || args.top_k < 1 ||
      args.top_k > Config::kMaxTopK || args.top_k > args.experts || !groups_fit ||
      (args.gmem_unit_ranks != nullptr && unit_slots_of<Config>(args) == 0)) {
    return cudaErrorInvalidValue;
  }
  return shares_warps(args) ? launch_route_shared<Config, 4, 8>(args, stream)
                            : launch_route_values<Config, 1>(args, stream);
}

}  // namespace tessera::cuda
