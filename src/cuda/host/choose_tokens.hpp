// SPDX-License-Identifier: Apache-2.0
// choose_tokens: token rounding and expert choice, from the logits and the top-k choice to slots by token.
// Host side: the call's arguments, which are the kernels' parameters too, the workspace and the launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/token_rounding.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

constexpr int kChoiceBlockTokens = 32;  // tokens whose slots one CTA counts and emits

struct ChooseTokensArguments {
  float const* gmem_logits;          // (T,E)
  float const* gmem_selection_bias;  // (E) or null; group_limited: it decides the kept groups
  int32_t const* gmem_topk_ids;      // (T,K) the top-k choice; null: experts choose
  float const* gmem_member_scores;   // (T,K) its scores, c = 1
  int64_t tokens;                    // T, 0 allowed
  int32_t experts;                   // E
  int32_t top_k;                     // K <= E
  Router router;
  int64_t capacity;            // expert_choice: tokens of each expert
  int32_t groups, top_groups;  // group_limited: both resolved, groups <= 32
  int64_t slots;               // P < 2^31

  int32_t* gmem_token_offsets;  // (T+1)
  int32_t* gmem_ids;            // (P) by token, then expert; -1 from slot token_offsets[T] on
  float* gmem_scores;           // (P); 0 from there on
  int32_t* gmem_topk_counts;    // (E) of the top-k choice, before rounding; or null
  void* gmem_workspace;         // choose_tokens_workspace_bytes, 16-byte aligned, any content
};

__host__ __device__ constexpr int64_t choice_blocks(int64_t tokens) {
  return (tokens + kChoiceBlockTokens - 1) / kChoiceBlockTokens;
}

/// What each expert keeps, ranks (E,T), slots of each block of tokens.
constexpr size_t choose_tokens_workspace_bytes(int64_t tokens, int64_t experts) {
  return sizeof(core::ExpertPairs) * static_cast<size_t>(experts) +
         4 * static_cast<size_t>(experts * tokens + choice_blocks(tokens) + 1);
}

/// Launches on `stream`; allocates nothing, waits for nothing. For equal logits the slots and the bits of the CPU's.
/// cudaErrorInvalidValue: more than 32 groups.
cudaError_t launch_choose_tokens(ChooseTokensArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
