// SPDX-License-Identifier: Apache-2.0
// A warp per token: its lanes take turns, their sums are folded by halves 16, 8, 4, 2, 1 as core::warp_sum does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::plain {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Every lane gets the sum.
__device__ inline float warp_sum(float partial) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    partial += __shfl_down_sync(kAllLanes, partial, half);
  }
  return __shfl_sync(kAllLanes, partial, 0);
}

__device__ inline float warp_max(float value) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, half));
  }
  return value;
}

// The slots of token t.
struct Slots {
  int64_t first, end;
};
template <class Arguments>
__device__ Slots slots_of(Arguments const& p, int64_t t) {
  if (p.gmem_token_offsets == nullptr) return {t * p.top_k, (t + 1) * p.top_k};
  return {p.gmem_token_offsets[t], p.gmem_token_offsets[t + 1]};
}

}  // namespace tessera::cuda::plain
