// SPDX-License-Identifier: Apache-2.0
// Ranks of the slots of up to 32 tokens among those of the same expert, as metadata_rank would find them: the tokens
// set their bits at the experts that they chose, in shared memory. A slot's rank is the number of bits below its own,
// an expert's count that of all. Tokens name an expert once; the CTA has a thread for each expert.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::warp {

class UnitRanks {
 public:
  __device__ __forceinline__ explicit UnitRanks(uint32_t* smem_tokens)
      : smem_tokens_(smem_tokens) {}

  // Before the barrier ahead of the first note().
  __device__ __forceinline__ void clear() { smem_tokens_[threadIdx.x] = 0; }
  __device__ __forceinline__ void note(int token, int expert) {
    atomicOr(smem_tokens_ + expert, 1u << token);  // their order does not matter
  }
  // These two after the barrier behind the last note().
  __device__ __forceinline__ int rank(int token, int expert) const {
    return __popc(smem_tokens_[expert] & ((1u << token) - 1));
  }
  __device__ __forceinline__ void store_counts(uint16_t* gmem_counts, int count) const {
    auto const e = static_cast<int>(threadIdx.x);
    if (e < count) gmem_counts[e] = static_cast<uint16_t>(__popc(smem_tokens_[e]));
  }

 private:
  uint32_t* smem_tokens_;  // by expert: a bit for each token that chose it
};

}  // namespace tessera::cuda::warp
