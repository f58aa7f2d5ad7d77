// SPDX-License-Identifier: Apache-2.0
// choose_tokens: token rounding and expert choice, from the logits and the top-k choice to slots by token.
// Host side: the call's arguments, which are the kernels' parameters too, the workspace and the launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cleared_words.hpp"
#include "core/token_rounding.hpp"
#include "route.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

constexpr int kChoiceBlockTokens = 32;  // tokens whose slots one CTA counts and emits

/// The routing tables of the chosen slots, those that metadata makes of other slots (host/metadata.hpp).
struct ChoiceTables {
  int32_t* gmem_expert_offsets = nullptr;       // (E+1), or null: no tables
  int32_t* gmem_sort_permutation = nullptr;     // (P) row -> slot; -1 from row R on
  int32_t* gmem_gather_index = nullptr;         // (P) row -> token; 0 from row R on
  int32_t* gmem_inverse_permutation = nullptr;  // (P) slot -> row; -1 from slot R on
  ClearedWords cleared = {};
  ClearedWords unused = {};  // elements that belong to no table (core/unused_elements.hpp)
};

struct ChooseTokensArguments {
  float const* gmem_logits;          // (T,E)
  float const* gmem_selection_bias;  // (E) or null; group_limited: it decides the kept groups
  int32_t const* gmem_topk_ids;      // (T,K) the top-k choice; null: experts choose
  float const* gmem_member_scores;   // (T,K) its scores, c = 1
  int64_t tokens;                    // T < 2^31, 0 allowed
  int32_t experts;                   // E
  int32_t top_k;                     // K <= E
  Router router;
  int64_t capacity;            // expert_choice: tokens of each expert; 0: an even share
  int32_t groups, top_groups;  // group_limited: both resolved, groups <= 32
  int64_t slots;               // P < 2^31

  int32_t* gmem_token_offsets;  // (T+1)
  int32_t* gmem_ids;            // (P) by token, then expert; -1 from slot token_offsets[T] on
  float* gmem_scores;           // (P); 0 from there on
  int32_t* gmem_topk_counts;    // (E) of the top-k choice, before rounding; or null
  void* gmem_workspace;         // choose_tokens_workspace_bytes, 32-byte aligned, any content
  /// (T) or null: tokens of 0 are padding, whose pairs have no rank.
  uint8_t const* gmem_token_mask = nullptr;
  ChoiceTables tables = {};
  /// The workspace has the ranks of all pairs: launch_route_and_rank comes ahead.
  bool has_ranks = false;
};

__host__ __device__ constexpr int64_t choice_blocks(int64_t tokens) {
  return (tokens + kChoiceBlockTokens - 1) / kChoiceBlockTokens;
}

/// Orders the pairs of an expert, larger first: by rank, equal ranks by lower token.
__host__ __device__ constexpr uint64_t pair_order(uint32_t rank, int64_t token) {
  return uint64_t{rank} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

/// Says which tokens of a block an expert keeps, a bit each, and how many it keeps in the blocks ahead.
struct alignas(8) KeptTokens {
  uint32_t tokens;
  int32_t before;
};

/// Describes an expert's ranks of a block: members and the other eligible tokens, a bit each, and the ranks at the ends
/// that a choice cuts, of either; 0 or all bits where there is none.
struct alignas(32) BlockRanks {
  uint32_t members, others;
  uint32_t worst_member, best_other, worst_other;
};

/// Regions of the workspace.
struct ChoiceWorkspace {
  BlockRanks* gmem_block_ranks;   // (E,blocks)
  core::ExpertPairs* gmem_pairs;  // (E)
  KeptTokens* gmem_kept;          // (E,blocks)
  uint32_t* gmem_ranks;           // (E,T); 0: not eligible
  // (blocks+1) of each block; behind choose_tokens_scan, where that is launched, their exclusive sums and the total
  int32_t* gmem_block_slots;

  __device__ static ChoiceWorkspace of(ChooseTokensArguments const& p) {
    int64_t const blocks = p.experts * choice_blocks(p.tokens);
    auto* const block_ranks = static_cast<BlockRanks*>(p.gmem_workspace);
    auto* const pairs = reinterpret_cast<core::ExpertPairs*>(block_ranks + blocks);
    auto* const kept = reinterpret_cast<KeptTokens*>(pairs + p.experts);
    auto* const ranks = reinterpret_cast<uint32_t*>(kept + blocks);
    auto* const block_slots = reinterpret_cast<int32_t*>(ranks + p.tokens * p.experts);
    return {block_ranks, pairs, kept, ranks, block_slots};
  }
};

constexpr size_t choose_tokens_workspace_bytes(int64_t tokens, int64_t experts) {
  int64_t const blocks = choice_blocks(tokens);
  return sizeof(core::ExpertPairs) * static_cast<size_t>(experts) +
         (sizeof(BlockRanks) + sizeof(KeptTokens)) * static_cast<size_t>(experts * blocks) +
         4 * static_cast<size_t>(experts * tokens + blocks + 1);
}

/// Launches on `stream`; allocates nothing, waits for nothing. For equal logits the slots and the bits of the CPU's.
/// cudaErrorInvalidValue: more than 32 groups, or than kMaxChoosingExperts experts (kernel_limits.hpp).
cudaError_t launch_choose_tokens(ChooseTokensArguments const& args, cudaStream_t stream);

/// Says whether launch_route_and_rank serves a router: a softmax of the chosen, at most 16 of at most 256 experts,
/// without a selection bias, and what else the fast kernel of route asks.
bool route_ranks_pairs(RouteArguments const& route);

/// The top-k choice and its scores with c = 1, which `choice` names as its members, and the ranks of all pairs in the
/// workspace of `choice`: what launch_route and the first kernel of launch_choose_tokens leave, bit for bit.
/// cudaErrorInvalidValue: what it does not serve.
cudaError_t launch_route_and_rank(RouteArguments const& route, ChooseTokensArguments const& choice,
                                  cudaStream_t stream);

}  // namespace tessera::cuda
