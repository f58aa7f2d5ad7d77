// SPDX-License-Identifier: Apache-2.0
// route: I_t = the K largest keys of token t, ties to the lower expert, NaN above all; then the scores
//        (formulas: cpu/parallel/router_formula.hpp; the same fp32 operations in the same order).
// Shapes   logits (T,E) fp32; topk_ids, topk_weights, chosen_p (T,K)
// Work     reads 4TE, writes 8TK (12TK); per token K warp maxima over E/32 keys a lane; memory bound for small K
// Schedule a warp per token; lane l holds experts l, 32+l, 64+l, .. as ordered integers in registers
//   select  every lane keeps its two best; K times: maximum of the warp, lowest expert among equals; the winner's
//           lane moves up its second, and looks for the next two when both are gone
//   score   lane k holds the k-th choice; sums over the chosen are one butterfly, over all E first per lane
// Numerics fp32, compiled without contraction; sums fold 32 lanes by halves: the bits of core::warp_sum
// Requires E <= 1024, K <= 32
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/route.hpp"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouteConfig {
  static constexpr int kWarps = 8;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kMaxTopK = arch::kWarpThreads;
  static constexpr int kMaxGroups = arch::kWarpThreads;
};

constexpr uint32_t kWholeWarp = 0xffffffffu;

// Sum over the lanes in the order of core::warp_sum; every lane gets it.
__device__ __forceinline__ float fold_lanes(float value) {
  TESSERA_UNROLL
  for (int half = arch::kWarpThreads / 2; half > 0; half /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, half);
  }
  return value;
}

__device__ __forceinline__ float largest_of_lanes(float value) {
  return core::key_value(__reduce_max_sync(kWholeWarp, core::ordered_key(value)));
}

// Keys of one token, kValues a lane; 0 stands for no expert.
template <int kValues>
struct TokenKeys {
  uint32_t key[kValues];

  __device__ static int expert(int i) { return i * arch::kWarpThreads + arch::lane_idx(); }

  __device__ void load(RouteArguments const& p, float const* gmem_logits) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      key[i] = 0;
      if (expert(i) >= p.experts) continue;
      float value = gmem_logits[expert(i)];
      if (core::has_own_p(p.kind)) value = core::own_p(p.kind, value);
      float const bias = p.gmem_selection_bias != nullptr ? p.gmem_selection_bias[expert(i)] : 0.0f;
      key[i] = core::ordered_key(value + bias);
    }
  }

  struct Best {
    uint32_t key;
    int expert;
  };
  // The best of this lane's experts in [first, last), the lowest among equals.
  __device__ Best best_of_lane(int first, int last) const {
    Best own{0, INT_MAX};
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      bool const inside = expert(i) >= first && expert(i) < last;
      if (inside && key[i] > own.key) own = {key[i], expert(i)};
    }
    return own;
  }
  // The two best of this lane's experts that come after `last` in the order of choice. Keys of experts that do
  // not exist are 0 and never win: no bounds.
  __device__ void best_after(Best last, Best& first, Best& second) const {
    first = second = {0, INT_MAX};
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      bool const after = key[i] < last.key || (key[i] == last.key && expert(i) > last.expert);
      if (after && key[i] > first.key) {
        second = first;
        first = {key[i], expert(i)};
      } else if (after && key[i] > second.key) {
        second = {key[i], expert(i)};
      }
    }
  }
  // The best of all lanes, the same in every lane.
  __device__ static Best best_of_warp(Best own) {
    uint32_t const largest = __reduce_max_sync(kWholeWarp, own.key);
    int const candidate = own.key == largest ? own.expert : INT_MAX;
    return {largest, __reduce_min_sync(kWholeWarp, candidate)};
  }
  __device__ Best best(int first, int last) const {
    return best_of_warp(best_of_lane(first, last));
  }
  __device__ void remove(int chosen) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      if (expert(i) == chosen) key[i] = 0;
    }
  }

  // Keeps the top_groups groups with the largest sums of their two largest keys.
  __device__ void mask_groups(RouteArguments const& p) {
    int const size = p.experts / p.groups;
    uint32_t group_key = 0;  // of group `lane`
    for (int g = 0; g < p.groups; ++g) {
      Best const first = best(g * size, (g + 1) * size);
      float sum = core::key_value(first.key);
      if (size > 1) {
        TokenKeys rest = *this;
        rest.remove(first.expert);
        sum += core::key_value(rest.best(g * size, (g + 1) * size).key);
      }
      if (arch::lane_idx() == g) group_key = core::ordered_key(sum);
    }
    uint32_t kept = 0;
    for (int i = 0; i < p.top_groups; ++i) {
      uint32_t const largest = __reduce_max_sync(kWholeWarp, group_key);
      int const winner = __ffs(__ballot_sync(kWholeWarp, group_key == largest)) - 1;
      kept |= 1u << winner;
      if (arch::lane_idx() == winner) group_key = 0;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      int const group = expert(i) / size;
      if (group < p.groups && (kept >> group & 1) == 0) key[i] = 0;
    }
  }
};

// sum over all experts of exp(l - largest), and that largest logit.
template <int kValues>
__device__ __forceinline__ float softmax_sum(RouteArguments const& p, float const* gmem_logits,
                                             float& largest) {
  float logits[kValues];
  uint32_t own = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kValues; ++i) {
    int const expert = TokenKeys<kValues>::expert(i);
    logits[i] = expert < p.experts ? gmem_logits[expert] : 0.0f;
    uint32_t const key = expert < p.experts ? core::ordered_key(logits[i]) : 0;
    own = key > own ? key : own;
  }
  largest = core::key_value(__reduce_max_sync(kWholeWarp, own));
  float sum = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kValues; ++i) {
    bool const inside = TokenKeys<kValues>::expert(i) < p.experts;
    if (inside) sum += core::exp_fp32(logits[i] - largest);
  }
  return fold_lanes(sum);
}

// Lane k holds the k-th chosen logit; writes score and p of its choice.
template <int kValues>
__device__ __forceinline__ void store_scores(RouteArguments const& p, float const* gmem_logits,
                                             float logit, int64_t slot) {
  bool const chosen = arch::lane_idx() < p.top_k;
  float term = 0, sum = 1;
  if (core::has_own_p(p.kind)) {
    if (chosen) term = core::own_p(p.kind, logit);
    if (chosen && p.gmem_chosen_p != nullptr) p.gmem_chosen_p[slot] = term;
    if (p.normalize_scores) sum = fold_lanes(term) + core::kNormalizeFloor;
  } else if (p.kind == RouterKind::softmax_topk) {
    float largest;
    sum = softmax_sum<kValues>(p, gmem_logits, largest);
    if (chosen) term = core::exp_fp32(logit - largest);
  } else {
    float const largest = largest_of_lanes(chosen ? logit : -INFINITY);
    if (chosen) term = core::exp_fp32(logit - largest);
    sum = fold_lanes(term);
  }
  if (chosen) p.gmem_topk_weights[slot] = p.route_scale * (term / sum);
}

template <class Config, int kValues>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    route(__grid_constant__ RouteArguments const p) {
  int64_t const token = int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx();
  if (token >= p.tokens) return;
  float const* const gmem_logits = p.gmem_logits + token * p.experts;
  TokenKeys<kValues> keys;
  keys.load(p, gmem_logits);
  if (p.kind == RouterKind::group_limited) keys.mask_groups(p);
  int choice = 0;
  typename TokenKeys<kValues>::Best own, next;
  keys.best_after({UINT_MAX, -1}, own, next);
  for (int k = 0; k < p.top_k; ++k) {
    int const expert = keys.best_of_warp(own).expert;
    if (arch::lane_idx() == k) choice = expert;
    if (own.expert == expert) {
      auto const taken = own;
      own = next;
      next = {0, INT_MAX};
      if (own.key == 0) keys.best_after(taken, own, next);  // seldom: a lane with three of the K
    }
  }
  int64_t const slot = token * p.top_k + arch::lane_idx();
  bool const chosen = arch::lane_idx() < p.top_k;
  if (chosen) p.gmem_topk_ids[slot] = choice;
  store_scores<kValues>(p, gmem_logits, chosen ? gmem_logits[choice] : 0.0f, slot);
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
  route<Config, kValues>
      <<<static_cast<unsigned>(ctas), Config::kWarps * arch::kWarpThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Config>
cudaError_t launch_route_config(RouteArguments const& args, cudaStream_t stream) {
  bool const groups_fit = args.kind != RouterKind::group_limited ||
                          (args.groups >= 1 && args.groups <= Config::kMaxGroups);
  if (args.kind == RouterKind::given || args.kind == RouterKind::expert_choice || args.top_k < 1 ||
      args.top_k > Config::kMaxTopK || args.top_k > args.experts || !groups_fit) {
    return cudaErrorInvalidValue;
  }
  return launch_route_values<Config, 1>(args, stream);
}

}  // namespace tessera::cuda
