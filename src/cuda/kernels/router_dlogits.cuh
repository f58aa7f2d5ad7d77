// SPDX-License-Identifier: Apache-2.0
// router_dlogits: ds of a token's slots, the sum of their rows' partials in order + <dO_t, b_down[e]>; from them dl_t
//                 by the router's formula (plain/router_dlogits.cu, of which this has the bits).
// Shapes   partials (P,groups) fp32, ds (T,K) fp32, dl (T,E) as bf16, fp32 or both
// Work     reads 4*P*groups + 12*P (of a softmax over all 4TE, of a bias 2Td..), writes 4*P + 2TE (6TE)
// Schedule a warp per token: lane k has slot k, then lane l has experts l, 32+l, .. in a row of shared memory
// Numerics fp32, compiled without contraction; lanes take experts in turn, sums fold 32 lanes by halves
// Requires E <= 1024, K <= 32, K slots for every token, dl on a multiple of 16 bytes
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/warp.cuh"
#include "../block/fold.cuh"
#include "../host/router_backward.hpp"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterDlogitsConfig {
  static constexpr int kWarps = 8;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kMaxTopK = arch::kWarpThreads;
};

// Slot k of the warp's token, in lane k.
struct TokenSlot {
  bool routed;  // its id is an expert's
  int id;
  int64_t row;  // negative: none
  float score, ds;
};

// <dO, b_down[expert of row]>, the columns shared by the lanes.
__device__ __forceinline__ float bias_term(DscoresArguments const& p, int64_t row) {
  int low = 0, high = p.experts;
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    (p.gmem_expert_offsets[middle] <= row ? low : high) = middle;
  }
  int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
  auto const* const gmem_d_o = static_cast<__nv_bfloat16 const*>(p.d_o.gmem) + source * p.d_o.pitch;
  auto const* const gmem_bias = static_cast<__nv_bfloat16 const*>(p.b_down.gmem);
  float partial = 0;
  for (int64_t c = arch::lane_idx(); c < p.hidden; c += arch::kWarpThreads) {
    partial = fmaf(__bfloat162float(gmem_d_o[c]),
                   __bfloat162float(gmem_bias[p.b_down.row_offset(low, c)]), partial);
  }
  return block::fold_sum(partial);
}

__device__ __forceinline__ float dscore_of_lane(DscoresArguments const& p, int64_t slot,
                                                bool exists, int64_t row) {
  float ds = 0;
  if (row >= 0) {
    for (int64_t group = 0; group < p.groups; ++group) {
      ds += p.gmem_ds_partials[row * p.groups + group];
    }
  }
  if (p.b_down.gmem != nullptr) {
    for (uint32_t left = __ballot_sync(block::kWholeWarp, row >= 0); left != 0; left &= left - 1) {
      int const owner = __ffs(static_cast<int>(left)) - 1;
      float const term = bias_term(p, __shfl_sync(block::kWholeWarp, row, owner));
      if (arch::lane_idx() == owner) ds += term;
    }
  }
  if (exists) p.gmem_dscores[slot] = ds;
  return ds;
}

// sum over the experts j of the token of q_j (ds_k - ds_j), for slot k of this lane.
__device__ __forceinline__ float centered(TokenSlot const& own, int top_k) {
  float sum = 0;
  for (int j = 0; j < top_k; ++j) {
    float const score = __shfl_sync(block::kWholeWarp, own.score, j);
    float const ds = __shfl_sync(block::kWholeWarp, own.ds, j);
    bool const routed = __shfl_sync(block::kWholeWarp, own.routed, j);
    if (routed) sum += score * (own.ds - ds);
  }
  return sum;
}

// smem_row (E) holds zeros; on return dl without what other losses add.
__device__ __forceinline__ void dlogits_over_chosen(RouterDlogitsArguments const& p,
                                                    TokenSlot const& own, int64_t slot,
                                                    float* smem_row) {
  float value;
  if (core::has_own_p(p.kind)) {
    float const chosen_p = own.routed ? p.gmem_chosen_p[slot] : 0.0f;
    float const sum = p.normalize_scores ? block::fold_sum(chosen_p) + core::kNormalizeFloor : 1.0f;
    float const g = p.normalize_scores ? centered(own, p.top_k) : p.route_scale * own.ds;
    value = core::own_p_gradient(p.kind, chosen_p, g / sum);
  } else {
    value = core::unscaled_score(p.route_scale, own.score) * centered(own, p.top_k);
  }
  if (!own.routed) return;
  smem_row[own.id] = value;
  if (p.gmem_row_dlogits != nullptr && own.row >= 0) p.gmem_row_dlogits[own.row] = value;
}

// The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
__device__ __forceinline__ void dlogits_over_all(RouterDlogitsArguments const& p,
                                                 TokenSlot const& own, float const* gmem_logits,
                                                 float* smem_row) {
  if (!__any_sync(block::kWholeWarp, own.routed)) return;
  float const mean = block::fold_sum(own.routed ? own.ds * own.score : 0.0f);
  int const lane = arch::lane_idx();
  float largest = -INFINITY, partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = gmem_logits[e];
    largest = fmaxf(largest, smem_row[e]);
  }
  largest = block::fold_max(largest);
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = core::exp_fp32(smem_row[e] - largest);
    partial += smem_row[e];
  }
  float const sum = block::fold_sum(partial);
  __syncwarp();
  if (own.routed) smem_row[own.id] = 0;
  __syncwarp();
  partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) partial += smem_row[e];
  float const rest = block::fold_sum(partial) / sum;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = smem_row[e] / sum * -mean;
  }
  float const others = centered(own, p.top_k);
  __syncwarp();
  if (!own.routed) return;
  smem_row[own.id] =
      core::unscaled_score(p.route_scale, own.score) * (p.route_scale * own.ds * rest + others);
}

// Four experts of a row, E a multiple of 4; of the caller's copy alone the rows need not be aligned.
__device__ __forceinline__ void put_four(RouterDlogitsArguments const& p, int64_t token, int expert,
                                         float4 value) {
  if (p.gmem_aux_dlogits != nullptr) {
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
  if (p.gmem_aux_dlogits != nullptr) value += p.gmem_aux_dlogits[token * p.aux_pitch + expert];
  int64_t const at = token * p.experts + expert;
  if (!p.dlogits_are_scratch) p.gmem_dlogits[at] = value;
  if (p.gmem_rounded != nullptr) {
    static_cast<__nv_bfloat16*>(p.gmem_rounded)[at] = __float2bfloat16_rn(value);
  }
  if (p.gmem_copy != nullptr) p.gmem_copy[token * p.copy_pitch + expert] = value;
}

template <class Config>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    router_dlogits(__grid_constant__ RouterGradientArguments const params) {
  RouterDlogitsArguments const& p = params.dlogits;
  extern __shared__ __align__(16) float smem_rows[];  // (warps, E rounded up to 4)
  int const lane = arch::lane_idx(), pitch = (p.experts + 3) / 4 * 4;
  int64_t const token = int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx();
  float* const smem_row = smem_rows + arch::warp_idx() * pitch;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) smem_row[e] = 0;
  if (token >= p.tokens) return;
  bool const exists = lane < p.top_k;
  int64_t const slot = token * p.top_k + lane;
  TokenSlot own{};
  if (exists) {
    own.id = p.gmem_ids[slot];
    own.routed = own.id >= 0;
    own.score = p.gmem_scores[slot];
  }
  own.row = exists ? params.dscores.gmem_inverse_permutation[slot] : -1;
  own.ds = dscore_of_lane(params.dscores, slot, exists, own.row);
  __syncwarp();
  if (core::has_softmax_over_all(p.kind)) {
    dlogits_over_all(p, own, p.gmem_logits + token * p.experts, smem_row);
  } else {
    dlogits_over_chosen(p, own, slot, smem_row);
  }
  __syncwarp();
  if (p.experts % 4 == 0) {
    for (int e = 4 * lane; e < p.experts; e += 4 * arch::kWarpThreads) {
      put_four(p, token, e, *reinterpret_cast<float4 const*>(smem_row + e));
    }
  } else {
    for (int e = lane; e < p.experts; e += arch::kWarpThreads) put_one(p, token, e, smem_row[e]);
  }
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
  auto const smem_bytes = sizeof(float) * Config::kWarps * ((p.experts + 3) / 4 * 4);
  int64_t const ctas = (p.tokens + Config::kWarps - 1) / Config::kWarps;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  router_dlogits<Config>
      <<<static_cast<unsigned>(ctas), Config::kWarps * arch::kWarpThreads, smem_bytes, stream>>>(
          args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
