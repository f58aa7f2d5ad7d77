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

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/approx_math.cuh"
#include "../arch/dependent_launch.cuh"
#include "../arch/launch_bounds.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
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
    __nv_bfloat162 const pairs[2] = {__floats2bfloat162_rn(value.x, value.y),
                                     __floats2bfloat162_rn(value.z, value.w)};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.gmem_rounded) + at) =
        *reinterpret_cast<uint2 const*>(pairs);
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

}  // namespace tessera::cuda
