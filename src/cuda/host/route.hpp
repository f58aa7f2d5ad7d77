// SPDX-License-Identifier: Apache-2.0
// route: the K experts of each token and their scores, from its logits.
// Host side: the call's arguments, which are the kernels' parameters too, and the two launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tessera/shape.hpp"

namespace tessera::cuda {

struct RouteArguments {
  float const* gmem_logits;          // (T,E)
  float const* gmem_selection_bias;  // (E) or null: added to the keys
  int32_t* gmem_topk_ids;            // (T,K)
  float* gmem_topk_weights;          // (T,K)
  float* gmem_chosen_p;              // (T,K) or null; routers with a p of their own
  int64_t tokens;                    // T, 0 allowed
  int32_t experts;                   // E
  int32_t top_k;                     // K <= E
  RouterKind kind;                   // any but given and expert_choice
  float route_scale;
  bool normalize_scores;
  int32_t groups, top_groups;  // group_limited: both resolved, groups <= 32
  /// For metadata, where route_unit_slots() is not 0 (host/metadata.hpp, MetadataWorkspace). Null: not wanted.
  uint16_t* gmem_unit_counts = nullptr;
  uint16_t* gmem_unit_ranks = nullptr;
};

/// Tokens whose slots route ranks together, where it does.
constexpr int32_t kRankedTokens = 32;

/// Slots of the units that route can rank while it is there, or 0: the fast kernel, 2 <= K <= 8 of up to 128 experts,
/// more than one block of metadata, and counts that metadata adds up in less time than a launch takes.
int32_t route_unit_slots(RouteArguments const& args);

/// Launches on `stream`; allocates nothing, waits for nothing. The bits of the CPU's router for equal logits.
/// cudaErrorInvalidValue: E > 1024, K > 32, more than 32 groups, or a router that has no logits.
cudaError_t launch_route(RouteArguments const& args, cudaStream_t stream);

/// The same bits for any E and K, one thread per token; up to 32 groups.
cudaError_t launch_route_plain(RouteArguments const& args, cudaStream_t stream);

/// Scores of ids that the caller chose (Router::replay), by the router's formula over the experts that a token names.
struct ScoreChoiceArguments {
  float const* gmem_logits;           // (T,E)
  int32_t const* gmem_ids;            // (P); negative: sentinel, scored 0
  int32_t const* gmem_token_offsets;  // (T+1); null: token t owns slots [t*K, (t+1)*K)
  float* gmem_scores;                 // (P)
  float* gmem_chosen_p;               // (P) or null; routers with a p of their own
  int64_t tokens;                     // T, 0 allowed
  int32_t experts;                    // E
  int32_t top_k;                      // K; not read with token_offsets
  RouterKind kind;                    // any but given
  float route_scale;
  bool normalize_scores;
};

/// One thread per token; the bits of the CPU's for equal logits.
cudaError_t launch_score_choice_plain(ScoreChoiceArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
