// SPDX-License-Identifier: Apache-2.0
// router_loss: losses of the logits l and their gradient dl, by the formulas of cpu/parallel/router_loss.cpp
//   load balancing  sum_t sum_e C_e p~_te,  p~ = softmax(l), or p / (sum p + 1e-20) for routers with a p of their own
//   of sequences    the same with C_be of the token's sequence b; kSequences: a kernel of its own
//   z-loss          z/S sum_t lse_t^2
// Shapes   l, dl (T,E) fp32, C (E), partials (2,blocks), losses (2)
// Work     reads 4TE once, writes 4TE (losses alone: nothing) and 8 bytes per 32 tokens
// Schedule router_loss       a CTA per block of 32 tokens, a warp per token: lane l holds experts l, 32+l, ..; then a
//                            warp per loss adds up the block. With padding blocks hold the real tokens first
//          router_loss_sums  a warp per loss adds up the blocks
// Numerics fp32, compiled without contraction; sums over experts, tokens and blocks go round the lanes and fold them by
//          halves: the bits of the CPU
// Requires E <= 1024
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/router_loss.hpp"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

struct RouterLossConfig {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * arch::kWarpThreads;
  static constexpr int kLosses = kRouterLosses;
  static constexpr int kMaxExperts = 1024;
};

struct TokenLoss {
  float balance = 0, z = 0, sequence = 0;
};

// A lane holds its share of one token's experts; zeros behind the last one, which leave every sum as it is.
template <int kLaneExperts, bool kOwnP, bool kSequences>
struct LaneRow {
  RouterLossArguments const& p;
  float softmax[kLaneExperts];
  float own_p[kOwnP ? kLaneExperts : 1];

  static __device__ int expert(int i) { return i * arch::kWarpThreads + arch::lane_idx(); }

  // visit(i, e) for the lane's experts.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    TESSERA_UNROLL
    for (int i = 0; i < kLaneExperts; ++i) {
      if (expert(i) < p.experts) visit(i, expert(i));
    }
  }

  // Fills in softmax and own_p; returns logsumexp.
  __device__ float load(float const* gmem_logits) {
    float largest = -INFINITY;
    TESSERA_UNROLL
    for (int i = 0; i < kLaneExperts; ++i) {
      softmax[i] = expert(i) < p.experts ? gmem_logits[expert(i)] : -INFINITY;
      largest = fmaxf(largest, softmax[i]);
    }
    largest = warp::fold_max(largest);
    float partial = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kLaneExperts; ++i) {
      bool const exists = expert(i) < p.experts;
      if constexpr (kOwnP) own_p[i] = exists ? core::own_p(p.kind, softmax[i]) : 0.0f;
      softmax[i] = exists ? core::exp_fp32(softmax[i] - largest) : 0.0f;
      partial += softmax[i];
    }
    float const sum = warp::fold_sum(partial);
    TESSERA_UNROLL
    for (int i = 0; i < kLaneExperts; ++i) softmax[i] = softmax[i] / sum;
    return largest + core::log_fp32(sum);
  }

  // Returns the divisor of own_p.
  __device__ float divisor() const {
    if constexpr (!kOwnP) return 1.0f;
    float partial = 0;
    for_each([&](int i, int) { partial += own_p[i]; });
    return warp::fold_sum(partial) + core::kNormalizeFloor;
  }

  __device__ TokenLoss loss(int64_t token, float const (&cost)[kLaneExperts]) {
    float const lse = load(p.gmem_logits + token * p.logits_pitch);
    float const own_sum = divisor(), z = p.gmem_cost[p.experts];
    float partial = 0;
    for_each([&](int i, int) {
      partial += cost[i] * (kOwnP ? own_p[kOwnP ? i : 0] / own_sum : softmax[i]);
    });
    float const balance = warp::fold_sum(partial);
    float sequence = 0;
    float const* gmem_sequence_cost = nullptr;
    if constexpr (kSequences) {
      int const own = p.gmem_sequence_of[token];
      if (own >= 0) gmem_sequence_cost = p.gmem_sequence_cost + own * int64_t{p.experts};
      partial = 0;
      if (gmem_sequence_cost != nullptr) {
        for_each([&](int i, int e) {
          partial += gmem_sequence_cost[e] * (kOwnP ? own_p[kOwnP ? i : 0] / own_sum : softmax[i]);
        });
      }
      sequence = warp::fold_sum(partial);
    }
    float const mean = kSequences ? balance + sequence : balance;
    if (p.gmem_dlogits != nullptr) {
      float* const gmem_row = p.gmem_dlogits + token * p.dlogits_pitch;
      float const two_z = 2.0f * z;  // times lse it may overflow, where a softmax of 0 follows
      for_each([&](int i, int e) {
        float const other = kSequences && gmem_sequence_cost != nullptr ? gmem_sequence_cost[e] : 0;
        float const centered = (kSequences ? cost[i] + other : cost[i]) - mean;
        float of_balance;
        if constexpr (kOwnP) {
          of_balance = core::own_p_gradient(p.kind, own_p[i], centered, own_sum);
        } else {
          of_balance = softmax[i] * centered;
        }
        gmem_row[e] = p.d_loss * (of_balance + two_z * softmax[i] * lse);
      });
    }
    return {balance, z * lse * lse, sequence};
  }

  __device__ void clear(int64_t token) const {
    if (p.gmem_dlogits == nullptr) return;
    float* const gmem_row = p.gmem_dlogits + token * p.dlogits_pitch;
    for_each([&](int, int e) { gmem_row[e] = 0; });
  }
};

template <class Config, int kLaneExperts, bool kOwnP, bool kSequences>
__global__ void __launch_bounds__(Config::kThreads)
    router_loss(__grid_constant__ RouterLossArguments const p) {
  static_assert(core::kLossTokens == arch::kWarpThreads, "a lane per token of a block");
  __shared__ float smem_losses[Config::kLosses][core::kLossTokens];
  int const warp = arch::warp_idx(), lane = arch::lane_idx();
  LaneRow<kLaneExperts, kOwnP, kSequences> row{p};
  int64_t const real = p.gmem_order != nullptr ? *p.gmem_count : p.tokens;
  float cost[kLaneExperts] = {};
  row.for_each([&](int i, int e) { cost[i] = p.gmem_cost[e]; });
  for (int i = warp; i < core::kLossTokens; i += Config::kWarps) {
    int64_t const place = int64_t{blockIdx.x} * core::kLossTokens + i;
    int64_t const token = p.gmem_order != nullptr && place < p.tokens ? p.gmem_order[place] : place;
    TokenLoss own;
    if (place < real) {
      own = row.loss(token, cost);
    } else if (place < p.tokens) {
      row.clear(token);
    }
    if (lane == 0) {
      smem_losses[0][i] = own.balance;
      smem_losses[1][i] = own.z;
      smem_losses[2][i] = own.sequence;
    }
  }
  if (!p.wants_losses()) return;
  __syncthreads();
  if (warp >= Config::kLosses) return;
  float const sum = warp::fold_sum(smem_losses[warp][lane]);
  if (lane == 0) p.gmem_partials[warp * int64_t{gridDim.x} + blockIdx.x] = sum;
}

template <class Config>
__global__ void __launch_bounds__(Config::kLosses* arch::kWarpThreads)
    router_loss_sums(__grid_constant__ RouterLossArguments const p) {
  int const loss = arch::warp_idx();
  float* const gmem_loss = loss == 2                  ? p.gmem_sequence_loss
                           : p.gmem_losses != nullptr ? p.gmem_losses + loss
                                                      : nullptr;
  if (gmem_loss == nullptr) return;
  int64_t const blocks = loss_blocks(p.tokens);
  float const* const gmem_partials = p.gmem_partials + loss * blocks;
  float partial = 0;
#pragma unroll 16
  for (int64_t b = arch::lane_idx(); b < blocks; b += arch::kWarpThreads) {
    partial += gmem_partials[b];
  }
  float const sum = warp::fold_sum(partial);
  if (arch::lane_idx() == 0) *gmem_loss = sum;
}

template <class Config, int kLaneExperts = 1>
cudaError_t launch_router_loss_blocks(RouterLossArguments const& args, unsigned blocks,
                                      cudaStream_t stream) {
  constexpr int kExperts = kLaneExperts * arch::kWarpThreads;
  if constexpr (kExperts < Config::kMaxExperts) {
    if (args.experts > kExperts) {
      return launch_router_loss_blocks<Config, 2 * kLaneExperts>(args, blocks, stream);
    }
  }
  bool const own_p = core::has_own_p(args.kind);
  auto* kernel = own_p ? router_loss<Config, kLaneExperts, true, false>
                       : router_loss<Config, kLaneExperts, false, false>;
  if (args.gmem_sequence_cost != nullptr) {
    kernel = own_p ? router_loss<Config, kLaneExperts, true, true>
                   : router_loss<Config, kLaneExperts, false, true>;
  }
  return host::launch_early(kernel, false, blocks, Config::kThreads, 0, stream, args);
}

template <class Config>
cudaError_t launch_router_loss_config(RouterLossArguments const& args, cudaStream_t stream) {
  int64_t const blocks = loss_blocks(args.tokens);
  if (args.experts > Config::kMaxExperts || blocks > INT_MAX) return cudaErrorInvalidValue;
  bool const wanted = args.gmem_dlogits != nullptr || args.wants_losses();
  if (blocks > 0 && wanted) {
    cudaError_t const error =
        launch_router_loss_blocks<Config>(args, static_cast<unsigned>(blocks), stream);
    if (error != cudaSuccess) return error;
  }
  if (!args.wants_losses()) return cudaSuccess;
  return host::launch_early(router_loss_sums<Config>, false, 1,
                            Config::kLosses * arch::kWarpThreads, 0, stream, args);
}

}  // namespace tessera::cuda
