// SPDX-License-Identifier: Apache-2.0
// router_dlogits: ds of a token's slots, the sum of their rows' partials in order + <dO_t, b_down[e]>; from them dl_t
//                 by the router's formula (plain/router_dlogits.cu, of which this has the bits).
// Shapes   partials (P,groups) fp32, ds (T,K) fp32, dl (T,E) as bf16, fp32 or both
// Work     reads 4*P*groups + 12*P (of a softmax over all 4TE, of a bias 2Td..), writes 4*P + 2TE (6TE)
// Schedule a warp has as many tokens as their slots fit into its lanes, so that the reads of all wait together:
//          kLanes lanes a token, of which lane k has slot k. Then the warp stores their rows of dl, collected in shared
//          memory. A softmax over all experts takes a warp per token: lane l has experts l, 32+l, ..
// Numerics fp32, compiled without contraction; lanes take experts in turn, sums fold 32 lanes by halves
// Requires what refuse() asks (layer/select.cpp)
//
// router_dlogits_rounded: the same after token rounding. dl reaches members of the top-k choice that were dropped, and
//                 experts that were added have scores of their own.
// Work     reads 4*P*groups + 12*P + 8*T*K (of tokens with an added expert 4E more), writes 4*P + 2TE (6TE)
// Schedule a warp per token: lane k has member k of its top-k choice and, 32 at a time, slot k. What slots say of
//          experts, and the row of dl, lie in shared memory by expert
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/approx_math.cuh"
#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
#include "../host/router_dlogits_rounded.hpp"
#include "../host/token_mask.hpp"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterDlogitsConfig {
  static constexpr int kWarps = 8;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kMaxTopK = arch::kWarpThreads;
  static constexpr int kWarpExperts = 1024;  // of all tokens of a warp: 4 KB of shared memory
};

// Slot k of a token, in lane k of those that the token has.
struct TokenSlot {
  bool routed;  // its id is an expert's
  int id;
  int64_t row;  // negative: none
  float score, ds;
};

// <dO, b_down[expert of row]>, eight columns of a lane at once.
__device__ __forceinline__ float bias_term(DscoresArguments const& p, int64_t row) {
  int low = 0, high = p.experts;
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    (p.gmem_expert_offsets[middle] <= row ? low : high) = middle;
  }
  int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
  auto const* const gmem_d_o = static_cast<__nv_bfloat16 const*>(p.d_o.gmem) + source * p.d_o.pitch;
  auto const* const gmem_bias =
      static_cast<__nv_bfloat16 const*>(p.b_down.gmem) + p.b_down.row_offset(low, 0);
  float partial = 0;
#pragma unroll 2
  for (int64_t c = arch::lane_idx() * kBiasVector; c < p.hidden;
       c += arch::kWarpThreads * kBiasVector) {
    uint4 const x = __ldg(reinterpret_cast<uint4 const*>(gmem_d_o + c));
    uint4 const b = __ldg(reinterpret_cast<uint4 const*>(gmem_bias + c));
    uint32_t const xs[] = {x.x, x.y, x.z, x.w}, bs[] = {b.x, b.y, b.z, b.w};
    TESSERA_UNROLL
    for (int j = 0; j < kBiasVector / 2; ++j) {
      float2 const x_pair = arch::unpack_bf16(xs[j]), b_pair = arch::unpack_bf16(bs[j]);
      partial = fmaf(x_pair.x, b_pair.x, partial);
      partial = fmaf(x_pair.y, b_pair.y, partial);
    }
  }
  __syncwarp();
  return warp::fold_sum(partial);
}

__device__ __forceinline__ float dscore_of_lane(DscoresArguments const& p, int64_t slot,
                                                bool exists, int64_t row) {
  float ds = 0;
  if (row >= 0) {
    float const* const gmem_partials = p.gmem_ds_partials + row * p.groups;
    for (int64_t group = 0; group < p.groups; ++group) ds += gmem_partials[group];
  }
  if (p.b_down.gmem != nullptr) {
    for (uint32_t left = __ballot_sync(arch::kAllLanes, row >= 0); left != 0; left &= left - 1) {
      int const owner = __ffs(static_cast<int>(left)) - 1;
      float const term = bias_term(p, __shfl_sync(arch::kAllLanes, row, owner));
      if (arch::lane_idx() == owner) ds += term;
    }
  }
  if (exists) p.gmem_dscores[slot] = ds;
  return ds;
}

// sum over the experts j of the token of q_j (ds_k - ds_j), for slot k of this lane.
template <int kLanes>
__device__ __forceinline__ float centered(TokenSlot const& own, int top_k) {
  float sum = 0;
  for (int j = 0; j < top_k; ++j) {
    float const score = __shfl_sync(arch::kAllLanes, own.score, j, kLanes);
    float const ds = __shfl_sync(arch::kAllLanes, own.ds, j, kLanes);
    bool const routed = __shfl_sync(arch::kAllLanes, own.routed, j, kLanes);
    if (routed) sum += score * (own.ds - ds);
  }
  return sum;
}

// smem_row (E) holds zeros; on return dl without what other losses add.
template <int kLanes>
__device__ __forceinline__ void dlogits_over_chosen(RouterDlogitsArguments const& p,
                                                    TokenSlot const& own, int64_t slot,
                                                    float* smem_row) {
  float value;
  if (core::has_own_p(p.kind)) {
    float const chosen_p = own.routed ? p.gmem_chosen_p[slot] : 0.0f;
    float g = p.route_scale * own.ds, sum = 1.0f;
    if (p.normalize_scores) {
      // The q of the chosen add up to 1 - rest: g_k - sum of g q = g_k rest + centered.
      auto const normalizer = core::normalizer(warp::fold_sum<kLanes>(chosen_p));
      sum = normalizer.sum;
      g = g * normalizer.rest + centered<kLanes>(own, p.top_k);
    }
    value = core::own_p_gradient(p.kind, chosen_p, g, sum);
  } else {
    value = core::unscaled_score(p.route_scale, own.score) * centered<kLanes>(own, p.top_k);
  }
  if (!own.routed) return;
  smem_row[own.id] = value;
  if (p.gmem_row_dlogits != nullptr && own.row >= 0) p.gmem_row_dlogits[own.row] = value;
}

// The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
__device__ __forceinline__ void dlogits_over_all(RouterDlogitsArguments const& p,
                                                 TokenSlot const& own, float const* gmem_logits,
                                                 float* smem_row) {
  if (!__any_sync(arch::kAllLanes, own.routed)) return;
  float const mean = warp::fold_sum(own.routed ? own.ds * own.score : 0.0f);
  int const lane = arch::lane_idx();
  float largest = -INFINITY, partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = gmem_logits[e];
    largest = fmaxf(largest, smem_row[e]);
  }
  largest = warp::fold_max(largest);
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = core::exp_fp32(smem_row[e] - largest);
    partial += smem_row[e];
  }
  float const sum = warp::fold_sum(partial);
  __syncwarp();
  if (own.routed) smem_row[own.id] = 0;
  __syncwarp();
  partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) partial += smem_row[e];
  float const rest = warp::fold_sum(partial) / sum;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = smem_row[e] / sum * -mean;
  }
  float const others = centered<arch::kWarpThreads>(own, p.top_k);
  __syncwarp();
  if (!own.routed) return;
  smem_row[own.id] =
      core::unscaled_score(p.route_scale, own.score) * (p.route_scale * own.ds * rest + others);
}

// Four experts of a row, E a multiple of 4; of the caller's copy alone the rows need not be aligned.
__device__ __forceinline__ void put_four(RouterDlogitsArguments const& p, int64_t token, int expert,
                                         float4 value) {
  if (p.gmem_aux_dlogits != nullptr && is_real(p.gmem_token_mask, token)) {
    float const* const gmem_aux = p.gmem_aux_dlogits + token * p.aux_pitch + expert;
    value.x += gmem_aux[0];
    value.y += gmem_aux[1];
    value.z += gmem_aux[2];
    value.w += gmem_aux[3];
  }
  int64_t const at = token * p.experts + expert;
  if (!p.dlogits_are_scratch) *reinterpret_cast<float4*>(p.gmem_dlogits + at) = value;
  if (p.gmem_rounded != nullptr) {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.gmem_rounded) + at) = {
        arch::pack_bf16(value.x, value.y), arch::pack_bf16(value.z, value.w)};
  }
  if (p.gmem_copy != nullptr) {
    float* const gmem_copy = p.gmem_copy + token * p.copy_pitch + expert;
    if (p.copy_pitch % 4 == 0 && reinterpret_cast<uintptr_t>(p.gmem_copy) % 16 == 0) {
      *reinterpret_cast<float4*>(gmem_copy) = value;
    } else {
      gmem_copy[0] = value.x;
      gmem_copy[1] = value.y;
      gmem_copy[2] = value.z;
      gmem_copy[3] = value.w;
    }
  }
}

__device__ __forceinline__ void put_one(RouterDlogitsArguments const& p, int64_t token, int expert,
                                        float value) {
  if (p.gmem_aux_dlogits != nullptr && is_real(p.gmem_token_mask, token)) {
    value += p.gmem_aux_dlogits[token * p.aux_pitch + expert];
  }
  int64_t const at = token * p.experts + expert;
  if (!p.dlogits_are_scratch) p.gmem_dlogits[at] = value;
  if (p.gmem_rounded != nullptr) {
    static_cast<__nv_bfloat16*>(p.gmem_rounded)[at] = __float2bfloat16_rn(value);
  }
  if (p.gmem_copy != nullptr) p.gmem_copy[token * p.copy_pitch + expert] = value;
}

// Rows of tokens first, first + 1, .. by the whole warp, which lie one after the other in shared memory.
__device__ __forceinline__ void put_rows(RouterDlogitsArguments const& p, int64_t first, int tokens,
                                         float const* smem_rows) {
  int const experts = p.experts, width = experts % 4 == 0 ? 4 : 1;
  int token = 0, expert = width * arch::lane_idx();
  for (;;) {
    while (expert >= experts) {
      expert -= experts;
      ++token;
    }
    if (token >= tokens) return;
    float const* const smem = smem_rows + token * experts + expert;
    if (width == 4) {
      put_four(p, first + token, expert, *reinterpret_cast<float4 const*>(smem));
    } else {
      put_one(p, first + token, expert, *smem);
    }
    expert += width * arch::kWarpThreads;
  }
}

// Floats of a warp's rows, in whole float4.
template <int kLanes>
__host__ __device__ constexpr int warp_floats(int experts) {
  return (arch::kWarpThreads / kLanes * experts + 3) / 4 * 4;
}

template <class Config, int kLanes>
__global__ void TESSERA_LAUNCH_BOUNDS(Config::kWarps* arch::kWarpThreads)
    router_dlogits(__grid_constant__ RouterGradientArguments const params) {
  constexpr int kTokens = arch::kWarpThreads / kLanes;
  RouterDlogitsArguments const& p = params.dlogits;
  arch::let_next_kernel_start();                 // up_projection_dgrad
  extern __shared__ __align__(16) float smem[];  // (warps, warp_floats())
  int const lane = arch::lane_idx(), floats = warp_floats<kLanes>(p.experts);
  int64_t const first = (int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx()) * kTokens;
  if (first >= p.tokens) return;
  float* const smem_rows = smem + arch::warp_idx() * floats;
  int64_t const token = first + lane / kLanes;
  bool const exists = lane % kLanes < p.top_k && token < p.tokens;
  int64_t const slot = token * p.top_k + lane % kLanes;
  TokenSlot own{};
  if (exists) {
    own.id = p.gmem_ids[slot];
    own.routed = own.id >= 0;
    own.score = p.gmem_scores[slot];
  }
  own.row = exists ? params.dscores.gmem_inverse_permutation[slot] : -1;
  for (int i = 4 * lane; i < floats; i += 4 * arch::kWarpThreads) {
    *reinterpret_cast<float4*>(smem_rows + i) = float4{};
  }
  own.ds = dscore_of_lane(params.dscores, slot, exists, own.row);
  __syncwarp();
  if (kLanes == arch::kWarpThreads && core::has_softmax_over_all(p.kind)) {
    dlogits_over_all(p, own, p.gmem_logits + token * p.experts, smem_rows);
  } else {
    dlogits_over_chosen<kLanes>(p, own, slot, smem_rows + lane / kLanes * p.experts);
  }
  __syncwarp();
  put_rows(p, first, static_cast<int>(min(int64_t{kTokens}, p.tokens - first)), smem_rows);
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
}

template <class Config, int kLanes>
cudaError_t launch_router_dlogits_lanes(RouterGradientArguments const& args, cudaStream_t stream) {
  RouterDlogitsArguments const& p = args.dlogits;
  if constexpr (kLanes > 2) {
    constexpr int kFewer = kLanes / 2;
    bool const fit = p.top_k <= kFewer && !core::has_softmax_over_all(p.kind) &&
                     arch::kWarpThreads / kFewer * p.experts <= Config::kWarpExperts;
    if (fit) return launch_router_dlogits_lanes<Config, kFewer>(args, stream);
  }
  constexpr int kCtaTokens = Config::kWarps * arch::kWarpThreads / kLanes;
  auto const smem_bytes = sizeof(float) * Config::kWarps * warp_floats<kLanes>(p.experts);
  int64_t const ctas = (p.tokens + kCtaTokens - 1) / kCtaTokens;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  return host::launch_early(router_dlogits<Config, kLanes>, args.starts_early, unsigned(ctas),
                            Config::kWarps * arch::kWarpThreads, smem_bytes, stream, args);
}

template <class Config>
cudaError_t launch_router_dlogits_config(RouterGradientArguments const& args, cudaStream_t stream) {
  RouterDlogitsArguments const& p = args.dlogits;
  bool const aligned = reinterpret_cast<uintptr_t>(p.gmem_dlogits) % sizeof(float4) == 0;
  if (p.kind == RouterKind::given || p.gmem_token_offsets != nullptr ||
      p.top_k > Config::kMaxTopK || p.experts > Config::kMaxExperts ||
      (!aligned && !p.dlogits_are_scratch)) {
    return cudaErrorInvalidValue;
  }
  return launch_router_dlogits_lanes<Config, arch::kWarpThreads>(args, stream);
}

// --- after token rounding ---------------------------------------------------------------------------------------

struct RouterDlogitsRoundedConfig {
  static constexpr int kWarps = 4;
  static constexpr int kMaxExperts = RouterDlogitsConfig::kMaxExperts;
  static constexpr int kMaxTopK = RouterDlogitsConfig::kMaxTopK;
};

// The slots of a token by the lanes of its warp, 32 at a time, all of which call these functions.
class RoundedSlots {
 public:
  struct Slot {
    int id = -1;
    bool added = false;  // its expert is none of the token's top-k choice
    float score = 0, ds = 0;
  };

  __device__ RoundedSlots(RoundedGradientArguments const& params, int64_t token, int member)
      : p_(params.rounded.dlogits),
        dscores_(params.dscores),
        member_(member),
        first_(p_.gmem_token_offsets[token]),
        end_(p_.gmem_token_offsets[token + 1]) {}

  // Makes the dscores; visit(slot) for every slot.
  template <class Visit>
  __device__ __forceinline__ void score(Visit&& visit) {
    for (int64_t base = first_; base < end_; base += arch::kWarpThreads) {
      int64_t const at = base + arch::lane_idx();
      bool const exists = at < end_;
      int64_t const row = exists ? dscores_.gmem_inverse_permutation[at] : -1;
      Slot slot = without_ds(at);
      slot.ds = dscore_of_lane(dscores_, at, exists, row);
      kept_ = slot;
      visit(slot);
    }
    __syncwarp();  // dscores of more slots than one each are read again
  }
  // visit(slot) once more.
  template <class Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
    for (int64_t base = first_; base < end_; base += arch::kWarpThreads) visit(slots_from(base));
  }
  // sum over the added experts j of score_j (ds - ds_j).
  __device__ __forceinline__ float centered(float ds) const {
    float sum = 0;
    for (int64_t base = first_; base < end_; base += arch::kWarpThreads) {
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
  __device__ __forceinline__ Slot without_ds(int64_t at) const {
    Slot slot;
    if (at < end_) {
      slot.id = p_.gmem_ids[at];
      slot.score = p_.gmem_scores[at];
    }
    slot.added = slot.id >= 0;
    for (int k = 0; k < p_.top_k; ++k) {
      if (__shfl_sync(arch::kAllLanes, member_, k) == slot.id) slot.added = false;
    }
    return slot;
  }
  __device__ __forceinline__ Slot slots_from(int64_t base) const {
    if (end_ - first_ <= arch::kWarpThreads) return kept_;
    int64_t const at = base + arch::lane_idx();
    Slot slot = without_ds(at);
    if (at < end_) slot.ds = dscores_.gmem_dscores[at];
    return slot;
  }

  RouterDlogitsArguments const& p_;
  DscoresArguments const& dscores_;
  int member_;
  int64_t first_, end_;
  Slot kept_;  // of the last 32
};

// Experts that were added, by the formula of a softmax over all experts; smem_row becomes their dl. `mean`: this lane's
// part of the sum of ds score.
__device__ __forceinline__ void dlogits_of_added(RouterDlogitsArguments const& p,
                                                 RoundedSlots const& slots, float mean,
                                                 float const* gmem_logits, float* smem_row) {
  int const lane = arch::lane_idx();
  mean = warp::fold_sum(mean);
  float largest = -INFINITY, partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = gmem_logits[e];
    largest = fmaxf(largest, smem_row[e]);
  }
  largest = warp::fold_max(largest);
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = core::exp_fp32(smem_row[e] - largest);
    partial += smem_row[e];
  }
  float const sum = warp::fold_sum(partial);
  __syncwarp();
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (slot.added) smem_row[slot.id] = 0;
  });
  __syncwarp();
  partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) partial += smem_row[e];
  float const rest = warp::fold_sum(partial) / sum;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = smem_row[e] / sum * -mean;
  }
  __syncwarp();
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    float const others = slots.centered(slot.ds);
    if (!slot.added) return;
    smem_row[slot.id] =
        core::unscaled_score(p.route_scale, slot.score) * (p.route_scale * slot.ds * rest + others);
  });
  __syncwarp();
}

// A softmax of the members: smem_row holds the dl of what was added.
__device__ __forceinline__ void add_member_softmax(RouterDlogitsArguments const& p, TokenSlot own,
                                                   float logit, float* smem_row) {
  float const largest = warp::fold_max(own.routed ? logit : -INFINITY);
  float const term = own.routed ? core::exp_fp32(logit - largest) : 0.0f;
  own.score = p.route_scale * (term / warp::fold_sum(term));
  float const others = centered<arch::kWarpThreads>(own, p.top_k);
  if (own.routed) smem_row[own.id] += core::unscaled_score(p.route_scale, own.score) * others;
}

// Writes the dl of a router whose experts have a p of their own.
__device__ __forceinline__ void own_p_dlogits(RouterDlogitsArguments const& p,
                                              RoundedSlots const& slots, TokenSlot own, float logit,
                                              float const* gmem_logits, float* smem_row) {
  float const own_p = own.routed ? core::own_p(p.kind, logit) : 0.0f;
  core::Normalizer normalizer;
  if (p.normalize_scores) normalizer = core::normalizer(warp::fold_sum(own_p));
  own.score = p.route_scale * (own_p / normalizer.sum);
  float partial = 0;
  slots.for_each([&](RoundedSlots::Slot const& slot) {
    if (!slot.added) return;
    partial += slot.score * slot.ds;
    smem_row[slot.id] = core::own_p_gradient(p.kind, core::own_p(p.kind, gmem_logits[slot.id]),
                                             p.route_scale * slot.ds, normalizer.sum);
  });
  float const of_added = warp::fold_sum(partial);
  float g = p.route_scale * own.ds;
  if (p.normalize_scores) {
    g = g * normalizer.rest + centered<arch::kWarpThreads>(own, p.top_k) - of_added;
  }
  if (own.routed) smem_row[own.id] = core::own_p_gradient(p.kind, own_p, g, normalizer.sum);
}

// Floats of a warp: a row of dl and, by expert, the ds of its slot, both of whole float4.
__host__ __device__ constexpr int rounded_row_floats(int experts) { return (experts + 3) / 4 * 4; }

template <class Config>
__global__ void TESSERA_LAUNCH_BOUNDS(Config::kWarps* arch::kWarpThreads)
    router_dlogits_rounded(__grid_constant__ RoundedGradientArguments const params) {
  RouterDlogitsArguments const& p = params.rounded.dlogits;
  TESSERA_DYNAMIC_SHARED(smem_rows);  // (warps, 2 rows)
  int const lane = arch::lane_idx(), floats = rounded_row_floats(p.experts);
  int64_t const token = int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx();
  // Slots that no token has.
  int64_t const threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t slot =
           p.gmem_token_offsets[p.tokens] + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       slot < params.dscores.slots; slot += threads) {
    params.dscores.gmem_dscores[slot] = 0;
  }
  if (token >= p.tokens) return;
  float* const smem_row = reinterpret_cast<float*>(smem_rows) + 2 * floats * arch::warp_idx();
  float* const smem_ds = smem_row + floats;
  float const* const gmem_logits = p.gmem_logits + token * p.experts;
  TokenSlot own{};
  own.id = lane < p.top_k ? params.rounded.gmem_unrounded_ids[token * p.top_k + lane] : -1;
  own.routed = own.id >= 0;
  float const logit = own.routed ? gmem_logits[own.id] : 0.0f;
  for (int e = 4 * lane; e < 2 * floats; e += 4 * arch::kWarpThreads) {
    *reinterpret_cast<float4*>(smem_row + e) = float4{};
  }
  __syncwarp();
  RoundedSlots slots(params, token, own.id);
  bool adds = false;
  float mean = 0;
  slots.score([&](RoundedSlots::Slot const& slot) {
    if (slot.id >= 0) smem_ds[slot.id] = slot.ds;
    adds = adds || slot.added;
    if (slot.added) mean += slot.ds * slot.score;
  });
  if (own.routed) own.ds = smem_ds[own.id];
  if (core::has_own_p(p.kind)) {
    own_p_dlogits(p, slots, own, logit, gmem_logits, smem_row);
  } else {
    if (__any_sync(arch::kAllLanes, adds)) {
      dlogits_of_added(p, slots, mean, gmem_logits, smem_row);
    }
    add_member_softmax(p, own, logit, smem_row);
  }
  __syncwarp();
  put_rows(p, token, 1, smem_row);
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
}

template <class Config>
cudaError_t launch_router_dlogits_rounded_config(RoundedGradientArguments const& args,
                                                 cudaStream_t stream) {
  RouterDlogitsArguments const& p = args.rounded.dlogits;
  bool const aligned = reinterpret_cast<uintptr_t>(p.gmem_dlogits) % sizeof(float4) == 0;
  if (p.kind == RouterKind::given || core::has_softmax_over_all(p.kind) ||
      p.gmem_token_offsets == nullptr || p.gmem_row_dlogits != nullptr ||
      p.top_k > Config::kMaxTopK || p.experts > Config::kMaxExperts ||
      (!aligned && !p.dlogits_are_scratch)) {
    return cudaErrorInvalidValue;
  }
  int64_t const ctas = (p.tokens + Config::kWarps - 1) / Config::kWarps;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  return host::launch_early(
      router_dlogits_rounded<Config>, args.starts_early, unsigned(ctas),
      Config::kWarps * arch::kWarpThreads,
      sizeof(float) * 2 * Config::kWarps * size_t(rounded_row_floats(p.experts)), stream, args);
}

}  // namespace tessera::cuda
