// SPDX-License-Identifier: Apache-2.0
// router_dlogits_rounded: router_dlogits (router_dlogits.cuh) after token rounding. dl reaches members of the top-k
//                 choice that were dropped, and experts that were added have scores of their own
//                 (plain/router_dlogits.cu).
// Shapes   partials (P,groups) fp32, ds (P) fp32, top-k choice (T,K), dl (T,E) as bf16, fp32 or both
// Work     reads 4*P*groups + 12*P + 8*T*K (of tokens with an added expert 4E more), writes 4*P + 2TE (6TE)
// Schedule a warp per token: lane k has member k of its top-k choice and, 32 at a time, slot k. What slots say of
//          experts, and the row of dl, lie in shared memory by expert
// Numerics as router_dlogits
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_dlogits_rounded.hpp"
#include "../router/dlogits.cuh"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterDlogitsRoundedConfig {
  static constexpr int kWarps = 4;
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
      p.top_k > kDlogitsMaxTopK || p.experts > kDlogitsMaxExperts ||
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
