// SPDX-License-Identifier: Apache-2.0
// router_dlogits_rounded: router_dlogits (router_dlogits.cuh) after token rounding. dl reaches members of the top-k
//                 choice that were dropped, and experts that were added have scores of their own
//                 (plain/router_dlogits.cu). With row_dlogits a token's dl goes to its rows; tokens of which an expert
//                 without a row may have one are listed instead, and row_dlogits of their rows are 0.
// Shapes   partials (P,groups) fp32, ds (P) fp32, top-k choice (T,K), dl (T,E) as bf16, fp32 or both; row_dlogits (P)
//          fp32, tokens listed (T) int32
// Work     reads 4*P*groups + 12*P + 8*T*K (of tokens with an added expert 4E more), writes 4*P + 2TE (6TE)
//          [, 4*P + T row_dlogits and flags]
// Schedule a warp has as many tokens as their members fit into its lanes: kLanes lanes a token, of which lane k has
//          member k and slot k. Where nothing was added, that is all. A CTA's warps share the other tokens: a whole
//          warp has one, slots 32 at a time, and what they say of experts in shared memory by expert. Then each stores
//          the rows of dl of its own, collected there
//   list   a CTA draws places for its tokens from a counter of places and of CTAs, so that the last one to come says
//          how many there are. Their order differs from run to run, and no bit of a row of router_dgrad depends on its
//          place
// Numerics as router_dlogits
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/load_global.cuh"
#include "../arch/signal.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_dlogits_rounded.hpp"
#include "../router/dlogits.cuh"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterDlogitsRoundedConfig {
  static constexpr int kWarps = 4;
  static constexpr int kCtasPerSm = 9;  // 56 registers, none spilled
  static constexpr int kFewestLanes = 4;
  static constexpr int kWarpExperts = 1024;  // of all tokens of a warp: 4 KB of shared memory
};

// The slots of a token by the lanes of its warp, 32 at a time, all of which call these functions. Makes their dscores.
class RoundedSlots {
 public:
  struct Slot {
    int id = -1, row = -1;
    bool added = false;  // its expert is none of the token's top-k choice
    float score = 0, ds = 0;
  };

  __device__ __forceinline__ RoundedSlots(RoundedGradientArguments const& params, int token,
                                          int member)
      : p_(params.rounded.dlogits),
        gmem_rows_(params.dscores.gmem_inverse_permutation),
        member_(member),
        first_(p_.gmem_token_offsets[token]),
        end_(p_.gmem_token_offsets[token + 1]) {
    kept_ = read(first_);
    for (int base = first_; base < end_; base += arch::kWarpThreads) {
      int const at = base + arch::lane_idx();
      bool const exists = at < end_, keeps = base == first_;
      int const row = keeps || !exists ? kept_.row : gmem_rows_[at];
      float const ds = dscore_of_lane(params.dscores, at, exists, exists ? row : -1);
      if (keeps) kept_.ds = ds;
    }
    __syncwarp();
  }

  // visit(slot) for every slot.
  template <class Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
    for (int base = first_; base < end_; base += arch::kWarpThreads) visit(slots_from(base));
  }
  // sum over the added experts j of score_j (ds - ds_j).
  __device__ __forceinline__ float centered(float ds) const {
    float sum = 0;
    for (int base = first_; base < end_; base += arch::kWarpThreads) {
      Slot const slots = slots_from(base);
      for (uint32_t left = __ballot_sync(arch::kAllLanes, slots.added); left != 0;
           left &= left - 1) {
        int const lane = __ffs(static_cast<int>(left)) - 1;
        float const score = __shfl_sync(arch::kAllLanes, slots.score, lane);
        sum += score * (ds - __shfl_sync(arch::kAllLanes, slots.ds, lane));
      }
    }
    return sum;
  }

 private:
  // A slot of this lane, without ds.
  __device__ __forceinline__ Slot read(int base) const {
    Slot slot;
    int const at = base + arch::lane_idx();
    if (at < end_) {
      slot.row = gmem_rows_[at];
      slot.id = p_.gmem_ids[at];
      slot.score = p_.gmem_scores[at];
    }
    slot.added = slot.id >= 0;
    for (int k = 0; k < p_.top_k; ++k) {
      if (__shfl_sync(arch::kAllLanes, member_, k) == slot.id) slot.added = false;
    }
    return slot;
  }
  __device__ __forceinline__ Slot slots_from(int base) const {
    if (base == first_) return kept_;
    Slot slot = read(base);
    int const at = base + arch::lane_idx();
    if (at < end_) slot.ds = p_.gmem_dscores[at];
    return slot;
  }

  RouterDlogitsArguments const& p_;
  int32_t const* gmem_rows_;  // of all slots
  int member_;
  int first_, end_;
  Slot kept_;  // of the first 32
};

// Experts that were added, by the formula of a softmax over all experts; smem_row becomes their dl. `mean`: this lane's
// part of the sum of ds score.
__device__ __forceinline__ void dlogits_of_added(RouterDlogitsArguments const& p,
                                                 RoundedSlots const& slots, float mean,
                                                 float const* gmem_logits, float* smem_row) {
  mean = warp::fold_sum(mean);
  float const rest = dlogits_of_others(p, mean, gmem_logits, smem_row, [&](float* smem) {
    slots.for_each([&](RoundedSlots::Slot const& slot) {
      if (slot.added) smem[slot.id] = 0;
    });
  });
  __syncwarp();
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    float const others = slots.centered(slot.ds);
    if (slot.added) smem_row[slot.id] = dlogit_of_slot(p, slot.score, slot.ds, rest, others);
  });
  __syncwarp();
}

// Returns dl of this lane's member by a softmax of the members.
template <int kLanes>
__device__ __forceinline__ float dlogit_by_softmax(RouterDlogitsArguments const& p, TokenSlot own,
                                                   float logit) {
  float const largest = warp::fold_max<kLanes>(own.routed ? logit : -INFINITY);
  float const term = own.routed ? core::exp_fp32(logit - largest) : 0.0f;
  own.score = p.route_scale * (term / warp::fold_sum<kLanes>(term));
  return core::unscaled_score(p.route_scale, own.score) * centered<kLanes>(own, p.top_k);
}

// Holds this lane's member of a router whose experts have a p of their own.
template <int kLanes>
class OwnPMember {
 public:
  __device__ __forceinline__ OwnPMember(RouterDlogitsArguments const& p, TokenSlot own, float logit)
      : p_(p), own_(own), own_p_(own.routed ? core::own_p(p.kind, logit) : 0.0f) {
    if (p.normalize_scores) normalizer_ = core::normalizer(warp::fold_sum<kLanes>(own_p_));
    own_.score = p.route_scale * (own_p_ / normalizer_.sum);
  }

  // Returns that of all members.
  __device__ __forceinline__ float sum() const { return normalizer_.sum; }
  // of_added: the sum of score ds over the experts that were added.
  __device__ __forceinline__ float dlogit(float of_added) const {
    float g = p_.route_scale * own_.ds;
    if (p_.normalize_scores) {
      g = g * normalizer_.rest + centered<kLanes>(own_, p_.top_k) - of_added;
    }
    return core::own_p_gradient(p_.kind, own_p_, g, normalizer_.sum);
  }

 private:
  RouterDlogitsArguments const& p_;
  TokenSlot own_;
  float own_p_;
  core::Normalizer normalizer_;
};

// Writes the dl of a router whose experts have a p of their own.
__device__ __forceinline__ void own_p_dlogits(RouterDlogitsArguments const& p,
                                              RoundedSlots const& slots, TokenSlot own, float logit,
                                              float const* gmem_logits, float* smem_row) {
  OwnPMember<arch::kWarpThreads> const member(p, own, logit);
  float partial = 0;
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (!slot.added) return;
    partial += slot.score * slot.ds;
    smem_row[slot.id] = core::own_p_gradient(p.kind, core::own_p(p.kind, gmem_logits[slot.id]),
                                             p.route_scale * slot.ds, member.sum());
  });
  float const value = member.dlogit(warp::fold_sum(partial));
  if (own.routed) smem_row[own.id] = value;
}

// Returns member k of a token, without score, ds and row.
__device__ __forceinline__ TokenSlot member_of(RoundedGradientArguments const& params, int token,
                                               int k) {
  RouterDlogitsArguments const& p = params.rounded.dlogits;
  TokenSlot own{};
  own.id = -1;
  if (token < p.tokens && k < p.top_k) {
    own.id = params.rounded.gmem_unrounded_ids[int64_t{token} * p.top_k + k];
  }
  own.routed = own.id >= 0;
  return own;
}

// The whole warp has one token, whatever was dropped or added; smem_ds (E) is scratch. Returns whether the token is to
// be listed.
__device__ __forceinline__ bool dlogits_of_any(RoundedGradientArguments const& params, int token,
                                               float* smem_row, float* smem_ds) {
  RouterDlogitsArguments const& p = params.rounded.dlogits;
  int const lane = arch::lane_idx();
  float const* const gmem_logits = p.gmem_logits + int64_t{token} * p.experts;
  TokenSlot own = member_of(params, token, lane);
  float const logit = own.routed ? gmem_logits[own.id] : 0.0f;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) smem_row[e] = smem_ds[e] = 0;
  RoundedSlots const slots(params, token, own.id);
  bool adds = false;
  float mean = 0;
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (slot.id >= 0) smem_ds[slot.id] = slot.ds;
    adds = adds || slot.added;
    if (slot.added) mean += slot.ds * slot.score;
  });
  adds = __any_sync(arch::kAllLanes, adds);
  __syncwarp();
  if (own.routed) own.ds = smem_ds[own.id];
  bool const has_own_p = core::has_own_p(p.kind);
  if (has_own_p) {
    own_p_dlogits(p, slots, own, logit, gmem_logits, smem_row);
  } else {
    if (adds) dlogits_of_added(p, slots, mean, gmem_logits, smem_row);
    float const value = dlogit_by_softmax<arch::kWarpThreads>(p, own, logit);
    if (own.routed) smem_row[own.id] += value;
  }
  __syncwarp();
  if (p.gmem_row_dlogits == nullptr) return false;
  bool without_row = adds && !has_own_p;
  int kept = 0;  // members with a row
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (slot.id >= 0 && slot.row < 0) without_row = true;
    kept += __popc(__ballot_sync(arch::kAllLanes, slot.id >= 0 && !slot.added && slot.row >= 0));
  });
  if (kept < __popc(__ballot_sync(arch::kAllLanes, own.routed))) without_row = true;
  bool const listed = __any_sync(arch::kAllLanes, without_row);
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (slot.row < 0) return;
    p.gmem_row_dlogits[slot.row] = listed || slot.id < 0 ? 0.0f : smem_row[slot.id];
  });
  return listed;
}

// Holds what a CTA knows of its tokens.
template <int kWarps, int kTokens>
struct RoundedTokens {
  static_assert(kWarps * kTokens <= arch::kWarpThreads, "a lane has one of them");
  uint32_t any[kWarps];  // the first lane of each token of the warp that dlogits_of_any() has
  bool listed[kWarps * kTokens];
};

// Makes the dl of those tokens of a warp whose slots are members; smem_rows: the rows of all. Returns in each lane
// whether its token is one of the others, for dlogits_of_any(); smem_listed: of each that is none.
template <int kLanes>
__device__ __forceinline__ bool dlogits_of_warp(RoundedGradientArguments const& params, int first,
                                                float* smem_rows, bool* smem_listed) {
  constexpr int kTokens = arch::kWarpThreads / kLanes;
  RouterDlogitsArguments const& p = params.rounded.dlogits;
  int const lane = arch::lane_idx(), k = lane % kLanes;
  int const token = first + lane / kLanes;
  bool const exists = token < p.tokens;
  TokenSlot own = member_of(params, token, k);
  float const logit = own.routed ? p.gmem_logits[int64_t{token} * p.experts + own.id] : 0.0f;
  int const slot = exists ? p.gmem_token_offsets[token] + k : 0;
  int const end = exists ? p.gmem_token_offsets[token + 1] : 0;
  bool const has_slot = slot < end;
  int const id = has_slot ? p.gmem_ids[slot] : -1;
  int const row = has_slot ? params.dscores.gmem_inverse_permutation[slot] : -1;
  for (int i = 4 * lane; i < kTokens * p.experts; i += 4 * arch::kWarpThreads) {
    *reinterpret_cast<float4*>(smem_rows + i) = float4{};
  }
  float const ds = dscore_of_lane(params.dscores, slot, has_slot, row);
  float* const smem_row = smem_rows + lane / kLanes * p.experts;
  __syncwarp();
  if (id >= 0) smem_row[id] = static_cast<float>(1 + k);  // the member learns which slot it has
  __syncwarp();
  int const place = own.routed ? static_cast<int>(smem_row[own.id]) - 1 : -1;
  bool const kept = place >= 0;
  own.ds = __shfl_sync(arch::kAllLanes, ds, max(place, 0), kLanes);
  own.row = __shfl_sync(arch::kAllLanes, row, max(place, 0), kLanes);
  if (!kept) own.ds = 0;
  auto const of_token = [lane](bool value) {
    uint32_t const lanes = __ballot_sync(arch::kAllLanes, value) >> (lane / kLanes * kLanes);
    return kLanes == arch::kWarpThreads ? lanes : lanes & ((1u << kLanes % arch::kWarpThreads) - 1);
  };
  // All slots are members where as many are as have an expert. A slot has both an expert and a row, or neither.
  uint32_t const odd = of_token((id >= 0) != (row >= 0) || (k == kLanes - 1 && slot + 1 < end));
  uint32_t const named = of_token(id >= 0), members = of_token(kept);
  bool const adds = odd != 0 || __popc(named) != __popc(members);
  bool const listed = of_token(own.routed && !kept) != 0;
  float value;
  if (core::has_own_p(p.kind)) {
    value = OwnPMember<kLanes>(p, own, logit).dlogit(0);
  } else {
    value = 0.0f + dlogit_by_softmax<kLanes>(p, own, logit);  // as what is added to 0
  }
  if (!adds && own.routed) {
    smem_row[own.id] = value;
    if (kept && p.gmem_row_dlogits != nullptr) p.gmem_row_dlogits[own.row] = listed ? 0.0f : value;
  }
  if (k == 0) smem_listed[lane / kLanes] = listed;
  if (exists && adds) {  // dlogits_of_any() reads these first
    constexpr int kLine = 128 / sizeof(float);
    for (int e = k * kLine; e < p.experts; e += kLanes * kLine) {
      arch::prefetch_l2(p.gmem_logits + int64_t{token} * p.experts + e);
    }
    if (k == 0) arch::prefetch_l2(p.gmem_scores + slot);
  }
  return exists && adds;
}

// Counts the floats of a warp's rows and of one more, in whole float4.
template <int kLanes>
__host__ __device__ constexpr int rounded_floats(int experts) {
  return ((arch::kWarpThreads / kLanes + 1) * experts + 3) / 4 * 4;
}

// Draws `count` places of the list, for a CTA: one word counts places in its lower half and CTAs in its upper one. The
// last CTA to come leaves it as the next launch expects it.
__device__ __forceinline__ int draw_places(ListedTokens const& listed, int count) {
  uint64_t const before = arch::count_relaxed_gpu(
      listed.gmem_counter, (uint64_t{1} << 32) + static_cast<uint64_t>(count));
  int const place = static_cast<int>(before);
  if (before >> 32 == gridDim.x - 1) {
    listed.gmem_offsets[1] = place + count;
    *listed.gmem_counter = 0;
  }
  return place;
}

template <class Config, int kLanes>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads, Config::kCtasPerSm)
    router_dlogits_rounded(__grid_constant__ RoundedGradientArguments const params) {
  constexpr int kTokens = arch::kWarpThreads / kLanes, kWarps = Config::kWarps;
  RouterDlogitsArguments const& p = params.rounded.dlogits;
  bool const lists = p.gmem_row_dlogits != nullptr;
  arch::let_next_kernel_start();      // router_dgrad
  TESSERA_DYNAMIC_SHARED(smem_rows);  // (warps, rounded_floats())
  using Tokens = RoundedTokens<kWarps, kTokens>;
  TESSERA_STATIC_SHARED(smem, Tokens);
  int const lane = arch::lane_idx(), warp = arch::warp_idx();
  int const cta_first = static_cast<int>(blockIdx.x) * kWarps * kTokens;
  int const first = cta_first + warp * kTokens;
  int const tokens = static_cast<int>(min(int64_t{kTokens}, p.tokens - first));
  auto const rows_of = [&](int of_warp) {
    return reinterpret_cast<float*>(smem_rows) + of_warp * rounded_floats<kLanes>(p.experts);
  };
  bool const any = tokens > 0 && dlogits_of_warp<kLanes>(params, first, rows_of(warp),
                                                         smem.listed + warp * kTokens);
  uint32_t const lanes = __ballot_sync(arch::kAllLanes, any && lane % kLanes == 0);
  if (lane == 0) smem.any[warp] = lanes;
  __syncthreads();
  for (int of_warp = 0, turn = 0; of_warp < kWarps; ++of_warp) {
    for (uint32_t left = smem.any[of_warp]; left != 0; left &= left - 1, ++turn) {
      if (turn % kWarps != warp) continue;
      int const index = (__ffs(static_cast<int>(left)) - 1) / kLanes;
      int const in_cta = of_warp * kTokens + index;
      bool const listed =
          dlogits_of_any(params, cta_first + in_cta, rows_of(of_warp) + index * p.experts,
                         rows_of(warp) + kTokens * p.experts);
      if (lane == 0) smem.listed[in_cta] = listed;
    }
  }
  __syncthreads();
  bool const has_token = lane < kWarps * kTokens && cta_first + lane < p.tokens;
  bool const listed = has_token && smem.listed[lane];
  uint32_t const all = __ballot_sync(arch::kAllLanes, listed);
  bool const writes_list = lists && warp == 0;
  int place = 0;
  if (writes_list && lane == 0) place = draw_places(params.listed, __popc(all));
  if (tokens > 0) put_rows(p, first, tokens, rows_of(warp));
  if (writes_list) {
    place = __shfl_sync(arch::kAllLanes, place, 0) + __popc(all & ((1u << lane) - 1));
    if (has_token) params.listed.gmem_is_listed[cta_first + lane] = listed ? 1 : 0;
    if (listed) params.listed.gmem_tokens[place] = cta_first + lane;
  }
  // Slots that no token has.
  int64_t const threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t slot =
           p.gmem_token_offsets[p.tokens] + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       slot < params.dscores.slots; slot += threads) {
    params.dscores.gmem_dscores[slot] = 0;
  }
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
}

template <class Config, int kLanes>
cudaError_t launch_router_dlogits_rounded_lanes(RoundedGradientArguments const& args,
                                                cudaStream_t stream) {
  RouterDlogitsArguments const& p = args.rounded.dlogits;
  if constexpr (kLanes > Config::kFewestLanes) {
    constexpr int kFewer = kLanes / 2;
    if (p.top_k <= kFewer && arch::kWarpThreads / kFewer * p.experts <= Config::kWarpExperts) {
      return launch_router_dlogits_rounded_lanes<Config, kFewer>(args, stream);
    }
  }
  constexpr int kCtaTokens = Config::kWarps * arch::kWarpThreads / kLanes;
  int64_t const ctas = (p.tokens + kCtaTokens - 1) / kCtaTokens;
  if (ctas == 0) return cudaSuccess;
  return host::launch_early(router_dlogits_rounded<Config, kLanes>, args.starts_early,
                            unsigned(ctas), Config::kWarps * arch::kWarpThreads,
                            sizeof(float) * Config::kWarps * rounded_floats<kLanes>(p.experts),
                            stream, args);
}

template <class Config>
cudaError_t launch_router_dlogits_rounded_config(RoundedGradientArguments const& args,
                                                 cudaStream_t stream) {
  RouterDlogitsArguments const& p = args.rounded.dlogits;
  constexpr int64_t kMaxTokens = int64_t{1} << 30;  // their numbers are 32-bit
  bool const aligned = reinterpret_cast<uintptr_t>(p.gmem_dlogits) % sizeof(float4) == 0;
  if (p.kind == RouterKind::given || core::has_softmax_over_all(p.kind) ||
      p.gmem_token_offsets == nullptr || p.top_k > kDlogitsMaxTopK || p.tokens > kMaxTokens ||
      p.experts > kDlogitsMaxExperts || (!aligned && !p.dlogits_are_scratch) ||
      (p.gmem_row_dlogits != nullptr &&
       (args.listed.gmem_tokens == nullptr || p.gmem_aux_dlogits != nullptr))) {
    return cudaErrorInvalidValue;
  }
  return launch_router_dlogits_rounded_lanes<Config, arch::kWarpThreads>(args, stream);
}

}  // namespace tessera::cuda
