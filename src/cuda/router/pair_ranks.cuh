// SPDX-License-Identifier: Apache-2.0
// This file has what the kernels that rank pairs do (rank_pairs, route_and_rank): the ranks of one token by its warp,
// and how those of a block of 32 tokens leave shared memory.
// Numerics fp32, to be compiled without contraction; sums fold 32 lanes by halves: the bits of the CPU
#pragma once

#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../warp/fold.cuh"
#include "block_ranks.cuh"
#include "core/fp32_math.hpp"
#include "core/router_math.hpp"
#include "core/token_rounding.hpp"

namespace tessera::cuda {

// Shared memory holds a block's ranks as (E, kRankPitch).
constexpr int kRankPitch = kChoiceBlockTokens + 1;

// Terms of a softmax are divided by core::DivisionBy where no logit is further below the largest: e^-60 is above 2^-90.
constexpr float kLeastBelowLargest = -60.0f;

// Returns the rank, core::pair_rank, of a pair that is no member and whose p is neither NaN nor -0.
__device__ __forceinline__ uint32_t rank_of_term(core::DivisionBy const& sum, float term) {
  return __float_as_uint(sum.quotient(term)) + 1;
}

// A warp's token: its ranks go to `column`, E values `stride` apart.
struct RankedToken {
  ChooseTokensArguments const& p;
  int32_t token;
  uint32_t* column;
  int64_t stride;

  __device__ float const* gmem_logits() const { return p.gmem_logits + int64_t{token} * p.experts; }
  __device__ int32_t member(int k) const { return p.gmem_topk_ids[int64_t{token} * p.top_k + k]; }
  __device__ float member_score(int k) const {
    return p.gmem_member_scores[int64_t{token} * p.top_k + k];
  }
  // visit(e) for the experts of this lane, of `count` from the first one on.
  template <class Visit>
  __device__ static void for_each(int count, Visit&& visit) {
    for (int i = arch::lane_idx(); i < count; i += arch::kWarpThreads) visit(i);
  }

  // The groups that the token keeps, as bits: the largest sums of two largest keys, ties to the lower group.
  __device__ uint32_t kept_groups() const {
    if (p.router.kind != RouterKind::group_limited || p.gmem_topk_ids == nullptr) return ~0u;
    int const size = p.experts / p.groups, own = arch::lane_idx();
    uint32_t first = 0, second = 0;
    for (int i = 0; own < p.groups && i < size; ++i) {
      int const e = own * size + i;
      float const bias = p.gmem_selection_bias != nullptr ? p.gmem_selection_bias[e] : 0.0f;
      float const value = core::own_p(p.router.kind, gmem_logits()[e]);
      uint32_t const key = core::ordered_key(value + bias);
      second = max(second, min(first, key));
      first = max(first, key);
    }
    float sum = core::key_value(first);
    if (size > 1) sum += core::key_value(second);
    uint32_t const key = own < p.groups ? core::ordered_key(sum) : 0;
    int before = 0;
    for (int g = 0; g < p.groups; ++g) {
      uint32_t const other = __shfl_sync(arch::kAllLanes, key, g);
      before += other > key || (other == key && g < own) ? 1 : 0;
    }
    return __ballot_sync(arch::kAllLanes, own < p.groups && before < p.top_groups);
  }

  // The logits as they are; returns the largest.
  __device__ float read_logits() const {
    constexpr int kAhead = 4;  // on their way at once
    uint32_t key = 0;
    for (int base = arch::lane_idx(); base < p.experts; base += kAhead * arch::kWarpThreads) {
      float logits[kAhead];
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        int const e = base + i * arch::kWarpThreads;
        logits[i] = e < p.experts ? gmem_logits()[e] : -INFINITY;
      }
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        int const e = base + i * arch::kWarpThreads;
        if (e < p.experts) column[e * stride] = __float_as_uint(logits[i]);
        key = max(key, core::ordered_key(logits[i]));
      }
    }
    return core::key_value(__reduce_max_sync(arch::kAllLanes, key));
  }

  // Returns the divisor of p of its own, which is that of the members.
  __device__ float divisor() const {
    if (!p.router.normalize_scores) return 1;
    float partial = 0;
    for_each(p.top_k,
             [&](int k) { partial += core::own_p(p.router.kind, gmem_logits()[member(k)]); });
    return warp::fold_sum<arch::kWarpThreads>(partial) + core::kNormalizeFloor;
  }

  // p of every expert.
  __device__ void rank_others() const {
    RouterKind const kind = p.router.kind;
    bool const own_p = core::has_own_p(kind);
    float const largest = read_logits();
    float partial = 0;
    for_each(p.experts, [&](int e) {
      float const logit = __uint_as_float(column[e * stride]);
      float const term = own_p ? core::own_p(kind, logit) : core::exp_fp32(logit - largest);
      column[e * stride] = __float_as_uint(term);
      partial += term;
    });
    float const sum = own_p ? divisor() : warp::fold_sum<arch::kWarpThreads>(partial);
    for_each(p.experts, [&](int e) {
      column[e * stride] = core::pair_rank(false, __uint_as_float(column[e * stride]) / sum);
    });
    uint32_t const kept = kept_groups();
    if (kept == ~0u) return;
    int const size = p.experts / p.groups;
    for_each(p.experts, [&](int e) {
      if ((kept >> e / size & 1) == 0) column[e * stride] = 0;
    });
  }

  // The same of a softmax over 32 kValues experts, or fewer unless kWhole. False: nothing is written, as terms may be
  // too small for this.
  template <int kValues, bool kWhole>
  __device__ bool rank_in_registers() const {
    int const lane = arch::lane_idx();
    float const* const own_logits = gmem_logits() + lane;
    auto const exists = [&](int i) { return kWhole || lane + i * arch::kWarpThreads < p.experts; };
    float value[kValues], own = -INFINITY;
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      value[i] = exists(i) ? own_logits[i * arch::kWarpThreads] : -INFINITY;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) own = fmaxf(own, value[i]);
    float const largest =
        core::key_value(__reduce_max_sync(arch::kAllLanes, core::ordered_key(own)));
    bool fits = true;
    float partial = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      float const above = exists(i) ? value[i] - largest : 0.0f;
      fits &= above >= kLeastBelowLargest;  // not of NaN, and not where the largest is infinite
      value[i] = core::exp_fp32_of_normal(above);
      partial += exists(i) ? value[i] : 0.0f;
    }
    if (!__all_sync(arch::kAllLanes, fits)) return false;
    core::DivisionBy const sum(warp::fold_sum<arch::kWarpThreads>(partial));
    uint32_t* const own_column = column + lane * stride;
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      uint32_t const rank = rank_of_term(sum, value[i]);
      if (exists(i)) own_column[i * arch::kWarpThreads * stride] = rank;
    }
    return true;
  }

  template <int kValues, bool kWhole>
  __device__ void rank() const {
    // The first member of each lane is on its way while the others are ranked.
    int const top_k = p.gmem_topk_ids != nullptr ? p.top_k : 0, lane = arch::lane_idx();
    int32_t const first = lane < top_k ? member(lane) : 0;
    float const score = lane < top_k ? member_score(lane) : 0;
    if constexpr (kValues > 0) {
      if (!rank_in_registers<kValues, kWhole>()) rank_others();
    } else {
      rank_others();
    }
    __syncwarp();
    if (lane < top_k) column[first * stride] = core::pair_rank(true, score);
    for (int k = lane + arch::kWarpThreads; k < top_k; k += arch::kWarpThreads) {
      column[member(k) * stride] = core::pair_rank(true, member_score(k));
    }
  }
};

// Stores the ranks of a CTA's block, whose shared memory is complete and which has `tokens` tokens, and their ends. By
// kThreads threads.
template <int kThreads>
__device__ __forceinline__ void store_block_ranks(ChooseTokensArguments const& p, int experts,
                                                  int tokens, uint32_t const* smem_ranks) {
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  BlockRanks* const gmem_blocks = workspace.gmem_block_ranks + blockIdx.x;
  for_each_half_block<kThreads>(experts, [&](int e, int begin, bool exists) {
    HalfBlockRanks ranks;
    uint32_t const* const smem_half = smem_ranks + min(e, experts - 1) * kRankPitch + begin;
    if (tokens == kChoiceBlockTokens) {
      TESSERA_UNROLL
      for (int t = HalfBlockRanks::kTokens - 1; t >= 0; --t) ranks.add(smem_half[t]);
    } else {
      for (int t = HalfBlockRanks::kTokens - 1; t >= 0; --t) {
        ranks.add(begin + t < tokens ? smem_half[t] : 0);
      }
    }
    ranks.store(gmem_blocks + e * int64_t{gridDim.x}, exists);
  });
  constexpr int kWarps = kThreads / arch::kWarpThreads;
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads, lane = arch::lane_idx();
  if (lane >= tokens) return;
  int64_t const token = int64_t{blockIdx.x} * kChoiceBlockTokens + lane;
  uint32_t const* smem_own = smem_ranks + warp * kRankPitch + lane;
  uint32_t* gmem_own = workspace.gmem_ranks + (warp * p.tokens + token);
  int64_t const step = kWarps * p.tokens;
#pragma unroll 4
  for (int e = warp; e < experts; e += kWarps) {
    *gmem_own = *smem_own;
    smem_own += kWarps * kRankPitch;
    gmem_own += step;
  }
}

}  // namespace tessera::cuda
