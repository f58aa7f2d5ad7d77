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
#pragma once

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
#include "../router/dlogits.cuh"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterDlogitsConfig {
  static constexpr int kWarps = 8;
  static constexpr int kWarpExperts = 1024;  // of all tokens of a warp: 4 KB of shared memory
};

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

__device__ __forceinline__ void dlogits_over_all(RouterDlogitsArguments const& p,
                                                 TokenSlot const& own, float const* gmem_logits,
                                                 float* smem_row) {
  if (!__any_sync(arch::kAllLanes, own.routed)) return;
  float const mean = warp::fold_sum(own.routed ? own.ds * own.score : 0.0f);
  float const rest = dlogits_of_others(p, mean, gmem_logits, smem_row, [&](float* smem) {
    if (own.routed) smem[own.id] = 0;
  });
  float const others = centered<arch::kWarpThreads>(own, p.top_k);
  __syncwarp();
  if (own.routed) smem_row[own.id] = dlogit_of_slot(p, own.score, own.ds, rest, others);
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
  if (p.kind == RouterKind::given || p.gmem_token_offsets != nullptr || p.top_k > kDlogitsMaxTopK ||
      p.experts > kDlogitsMaxExperts || (!aligned && !p.dlogits_are_scratch)) {
    return cudaErrorInvalidValue;
  }
  return launch_router_dlogits_lanes<Config, arch::kWarpThreads>(args, stream);
}

}  // namespace tessera::cuda
