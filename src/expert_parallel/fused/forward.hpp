// SPDX-License-Identifier: Apache-2.0
// The forward pass of experts on several GPUs in one launch: dispatch, up and down projection, combine and
// aggregate. Host side: arguments and launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "expert_parallel/exchange/exchange.hpp"
#include "tessera/shape.hpp"

namespace tessera::expert_parallel {

/// A pass leaves this for backward. Without tables: nothing.
struct SavedPass {
  RowTables tables = {};
  std::int64_t capacity = 0;  // rows that the tables and h hold
  bool may_overflow =
      false;  // where there are more they are left out, and only the host learns of it
  char* gmem_h =
      nullptr;  // [capacity,2n] bf16, gate half first; [capacity,n] without a gate; or null
  HostSignal host = {};
};

struct ForwardArguments {
  ExchangeArguments exchange;
  Activation activation;  // gated as exchange.shape says
  void const*
      gmem_w_up;  // [local_experts,2n,d] bf16, gate rows first; [local_experts,n,d] without a gate
  void const* gmem_w_down;  // [local_experts,d,n] bf16
  // bf16, or null: [local_experts,2n] in the order of the rows of w_up, and [local_experts,d] (biases.hpp)
  void const* gmem_b_up = nullptr;
  void const* gmem_b_down = nullptr;
  void* gmem_a;  // [pool_rows,n] bf16, workspace
  // [tokens,d] bf16, rows x_pitch elements apart, both at multiples of 16 bytes; null: in this rank's window already
  void const* gmem_x = nullptr;
  std::int64_t x_pitch = 0;
  void* gmem_o;      // out [tokens,d] bf16
  std::int32_t lag;  // units of down behind those of up; < 0: default_lag
  SavedPass saved = {};
};

/// All CTAs are resident (a cooperative launch of sm_count, less one where that is odd), in clusters of two.
/// cudaErrorInvalidValue: sm_count < 2, max_top_k > 32, hidden or intermediate no multiple of 8, something saved with
/// Transfer::partial_combine, biases that are not adds_biases().
cudaError_t launch_forward(ForwardArguments const& args, int sm_count, cudaStream_t stream);

}  // namespace tessera::expert_parallel
