// SPDX-License-Identifier: Apache-2.0
// This file has what both kernels of dlogits do (router_dlogits, router_dlogits_rounded): a slot's ds, the sum of its
// row's partials in order + <dO_t, b_down[e]>; terms of a token's experts; a softmax over all experts; the stores of
// rows of dl. All lanes of a warp call each function; lanes take experts in turn, and sums fold 32 lanes by halves.
// Numerics fp32, to be compiled without contraction: the bits are those of plain/router_dlogits.cu
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/approx_math.cuh"
#include "../arch/warp.cuh"
#include "../host/router_backward.hpp"
#include "../host/token_mask.hpp"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

// These are the most that kernels of dlogits serve: a lane has a member of a token's choice.
constexpr int kDlogitsMaxExperts = 1024;
constexpr int kDlogitsMaxTopK = arch::kWarpThreads;

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

// A softmax over all experts: smem_row (E) becomes -mean p_e, which is dl of experts that no slot names.
// forget(smem_row) writes 0 at the experts of slots; the result is `rest`, the sum of the others' p.
template <class Forget>
__device__ __forceinline__ float dlogits_of_others(RouterDlogitsArguments const& p, float mean,
                                                   float const* gmem_logits, float* smem_row,
                                                   Forget&& forget) {
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
  forget(smem_row);
  __syncwarp();
  partial = 0;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) partial += smem_row[e];
  float const rest = warp::fold_sum(partial) / sum;
  for (int e = lane; e < p.experts; e += arch::kWarpThreads) {
    smem_row[e] = smem_row[e] / sum * -mean;
  }
  return rest;
}

// dl of a slot's expert there. The p of all slots add up to 1 - rest: g_k - sum of g p = g_k rest + others, where
// `others` is the sum over the slots j of p_j (g_k - g_j).
__device__ __forceinline__ float dlogit_of_slot(RouterDlogitsArguments const& p, float score,
                                                float ds, float rest, float others) {
  return core::unscaled_score(p.route_scale, score) * (p.route_scale * ds * rest + others);
}

// Four values that lie one after the other in dl, from `at` on.
__device__ __forceinline__ void put_four_in_dlogits(RouterDlogitsArguments const& p, int64_t at,
                                                    float4 value) {
  if (!p.dlogits_are_scratch) *reinterpret_cast<float4*>(p.gmem_dlogits + at) = value;
  if (p.gmem_rounded != nullptr) {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.gmem_rounded) + at) = {
        arch::pack_bf16(value.x, value.y), arch::pack_bf16(value.z, value.w)};
  }
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
  put_four_in_dlogits(p, token * p.experts + expert, value);
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

// The whole warp stores the rows of `tokens` tokens from `first` on, which lie one after the other in shared memory.
__device__ __forceinline__ void put_rows(RouterDlogitsArguments const& p, int64_t first, int tokens,
                                         float const* smem_rows) {
  int const experts = p.experts, width = experts % 4 == 0 ? 4 : 1;
  if (width == 4 && p.gmem_aux_dlogits == nullptr && p.gmem_copy == nullptr) {
    // Rows lie one after the other then, and no lane needs to know its token.
    for (int i = 4 * arch::lane_idx(); i < tokens * experts; i += 4 * arch::kWarpThreads) {
      put_four_in_dlogits(p, first * experts + i, *reinterpret_cast<float4 const*>(smem_rows + i));
    }
    return;
  }
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

}  // namespace tessera::cuda
