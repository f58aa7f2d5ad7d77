// SPDX-License-Identifier: Apache-2.0
// Load-balancing and z-loss of a router's logits, and their gradient.
// Host side: the call's arguments, which are the kernels' parameters too, and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/router_math.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

struct RouterLossArguments {
  float const* gmem_logits;  // (T,E), rows logits_pitch elements apart
  int64_t logits_pitch;
  float const* gmem_cost;  // (E+1): C_e = balance E f_e / (S sum f), then z / S
  float* gmem_dlogits;     // (T,E), rows dlogits_pitch elements apart; null: not wanted
  int64_t dlogits_pitch;
  float* gmem_losses;         // (2): load balancing and z; null: not wanted
  float* gmem_sequence_loss;  // (1); null: not wanted
  float* gmem_partials;       // (3, loss_blocks(T))
  int64_t tokens;             // T, 0 allowed
  int32_t experts;            // E
  RouterKind kind;            // any but given
  float d_loss;
  /// The real tokens, then those of padding; null: all are real.
  int32_t const* gmem_order = nullptr;  // (T)
  int32_t const* gmem_count = nullptr;  // one int: how many are real
  float const* gmem_sequence_cost =
      nullptr;  // (B,E): C_be of the loss of sequences; null: none is wanted
  int32_t const* gmem_sequence_of = nullptr;  // (T) the sequence of a token; negative: none

  [[nodiscard]] __host__ __device__ bool wants_losses() const {
    return gmem_losses != nullptr || gmem_sequence_loss != nullptr;
  }
};

/// Load balancing, z and sequences.
constexpr int kRouterLosses = 3;

__host__ __device__ constexpr int64_t loss_blocks(int64_t tokens) {
  return (tokens + core::kLossTokens - 1) / core::kLossTokens;
}

/// Launch on `stream`; allocate nothing, wait for nothing. The bits of the CPU's. The first serves up to 1024 experts.
cudaError_t launch_router_loss(RouterLossArguments const& args, cudaStream_t stream);
cudaError_t launch_router_loss_plain(RouterLossArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
