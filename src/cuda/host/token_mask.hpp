// SPDX-License-Identifier: Apache-2.0
// Padding: tokens whose byte of a mask is 0. Kernels go through the real tokens alone, by a list of them, so that their
// sums are those of a call without padding.
// Host side: the calls' arguments, which are the kernels' parameters too, and the launchers (layer/token_mask.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

/// True for a token that is not padding; without a mask none is.
__host__ __device__ constexpr bool is_real(uint8_t const* gmem_token_mask, int64_t token) {
  return gmem_token_mask == nullptr || gmem_token_mask[token] != 0;
}

/// The real tokens, ascending, then those of padding.
struct TokenOrder {
  uint8_t const* gmem_token_mask;  // (T)
  int64_t tokens;                  // T
  int32_t* gmem_order;             // (T)
  int32_t* gmem_count;             // one int: how many are real
};
cudaError_t launch_token_order(TokenOrder const& args, cudaStream_t stream);

/// Takes the slots of padding away: ids -1, scores and p 0.
struct MaskChoice {
  uint8_t const* gmem_token_mask;  // (T)
  int64_t tokens;                  // T
  int64_t top_k;                   // K
  int32_t* gmem_ids;               // (T,K)
  float* gmem_scores;              // (T,K)
  float* gmem_chosen_p;            // (T,K) or null
};
cudaError_t launch_mask_choice(MaskChoice const& args, cudaStream_t stream);

/// Packs what router_wgrad reads of real tokens: their dlogits, one after the other, and its chunks of them.
struct PackDlogits {
  int32_t const* gmem_order;    // (T)
  int32_t const* gmem_count;    //
  void const* gmem_dlogits;     // (T,columns) bf16
  int64_t tokens;               // T
  int64_t hidden;               // d
  int32_t columns;              // E, or several terms of E
  void* gmem_packed;            // (T,columns) bf16: rows below the count are written
  int32_t* gmem_chunk_offsets;  // (router_wgrad_most_chunks + 1)
};
cudaError_t launch_pack_dlogits(PackDlogits const& args, cudaStream_t stream);

}  // namespace tessera::cuda
