// SPDX-License-Identifier: Apache-2.0
// The losses of one token, and their gradient, by a warp, for any E: each value is computed where it is read. A CTA has
// the tokens of a block; then a warp per loss adds them up.
#include <climits>

#include "../host/router_loss.hpp"
#include "warp.cuh"

namespace tessera::cuda {
namespace {

using plain::kLanes;

constexpr int kLosses = kRouterLosses;

struct TokenLoss {
  float balance = 0, z = 0, sequence = 0;
};

__device__ TokenLoss token_loss(RouterLossArguments const& p, int64_t token) {
  float const* const gmem_logits = p.gmem_logits + token * p.logits_pitch;
  bool const has_own_p = core::has_own_p(p.kind);
  auto const for_each = [&](auto&& visit) {
    for (int e = int(threadIdx.x) % kLanes; e < p.experts; e += kLanes) visit(e, gmem_logits[e]);
  };
  auto const sum_of = [&](auto&& value) {
    float partial = 0;
    for_each([&](int e, float logit) { partial += value(e, logit); });
    return plain::warp_sum(partial);
  };
  float largest = -INFINITY;
  for_each([&](int, float logit) { largest = fmaxf(largest, logit); });
  largest = plain::warp_max(largest);
  float const sum = sum_of([&](int, float logit) { return core::exp_fp32(logit - largest); });
  float const lse = largest + core::log_fp32(sum);
  float const divisor = has_own_p
                            ? sum_of([&](int, float logit) { return core::own_p(p.kind, logit); }) +
                                  core::kNormalizeFloor
                            : 1.0f;
  auto const softmax = [&](float logit) { return core::exp_fp32(logit - largest) / sum; };
  auto const share = [&](float logit) {
    return has_own_p ? core::own_p(p.kind, logit) / divisor : softmax(logit);
  };
  float const balance = sum_of([&](int e, float logit) { return p.gmem_cost[e] * share(logit); });
  int const own = p.gmem_sequence_cost != nullptr ? p.gmem_sequence_of[token] : -1;
  float const* const gmem_other =
      own >= 0 ? p.gmem_sequence_cost + own * int64_t{p.experts} : nullptr;
  float const sequence = gmem_other == nullptr ? 0.0f : sum_of([&](int e, float logit) {
    return gmem_other[e] * share(logit);
  });
  float const mean = balance + sequence, z = p.gmem_cost[p.experts];
  TokenLoss const loss{balance, z * lse * lse, sequence};
  if (p.gmem_dlogits == nullptr) return loss;
  float const two_z = 2.0f * z;  // times lse it may overflow, where a softmax of 0 follows
  for_each([&](int e, float logit) {
    float const cost = gmem_other != nullptr ? p.gmem_cost[e] + gmem_other[e] : p.gmem_cost[e];
    float const centered = cost - mean;
    float const of_balance =
        has_own_p ? core::own_p_gradient(p.kind, core::own_p(p.kind, logit), centered, divisor)
                  : softmax(logit) * centered;
    p.gmem_dlogits[token * p.dlogits_pitch + e] =
        p.d_loss * (of_balance + two_z * softmax(logit) * lse);
  });
  return loss;
}

__global__ void __launch_bounds__(core::kLossTokens* kLanes, 1)  // 64 registers
    router_loss_plain(RouterLossArguments const p) {
  __shared__ float smem_losses[kLosses][core::kLossTokens];
  int const warp = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  int64_t const place = int64_t{blockIdx.x} * core::kLossTokens + warp;
  int64_t const real = p.gmem_order != nullptr ? *p.gmem_count : p.tokens;
  int64_t const token = p.gmem_order != nullptr && place < p.tokens ? p.gmem_order[place] : place;
  TokenLoss own;
  if (place < real) {
    own = token_loss(p, token);
  } else if (place < p.tokens && p.gmem_dlogits != nullptr) {
    for (int e = lane; e < p.experts; e += kLanes) p.gmem_dlogits[token * p.dlogits_pitch + e] = 0;
  }
  if (lane == 0) {
    smem_losses[0][warp] = own.balance;
    smem_losses[1][warp] = own.z;
    smem_losses[2][warp] = own.sequence;
  }
  __syncthreads();
  if (warp >= kLosses || !p.wants_losses()) return;
  float const sum = plain::warp_sum(smem_losses[warp][lane]);
  if (lane == 0) p.gmem_partials[warp * int64_t{gridDim.x} + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kLosses* kLanes)
    router_loss_sums_plain(RouterLossArguments const p) {
  int const loss = int(threadIdx.x) / kLanes, lane = int(threadIdx.x) % kLanes;
  float* const gmem_loss = loss == 2                  ? p.gmem_sequence_loss
                           : p.gmem_losses != nullptr ? p.gmem_losses + loss
                                                      : nullptr;
  if (gmem_loss == nullptr) return;
  int64_t const blocks = loss_blocks(p.tokens);
  float partial = 0;
  for (int64_t b = lane; b < blocks; b += kLanes) partial += p.gmem_partials[loss * blocks + b];
  float const sum = plain::warp_sum(partial);
  if (lane == 0) *gmem_loss = sum;
}

}  // namespace

cudaError_t launch_router_loss_plain(RouterLossArguments const& args, cudaStream_t stream) {
  int64_t const blocks = loss_blocks(args.tokens);
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  if (blocks > 0) {
    router_loss_plain<<<static_cast<unsigned>(blocks), core::kLossTokens * kLanes, 0, stream>>>(
        args);
  }
  if (args.wants_losses()) {
    router_loss_sums_plain<<<1, kLosses * kLanes, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace tessera::cuda
