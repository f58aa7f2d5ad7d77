// SPDX-License-Identifier: Apache-2.0
// Makes routing tables from what the caller gives: ids and weights, or grouped rows; and outputs of them for the
// caller.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/host/cleared_words.hpp"
#include "tessera/moe.hpp"
#include "tessera/routing.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

/// int32 or int64 values.
struct Integers {
  void const* gmem = nullptr;
  bool is_int64 = false;
};
inline Integers integers(ConstTensor const& tensor) noexcept {
  return {tensor.data, tensor.dtype == DType::int64};
}

/// Copies the caller's slots to dense tables: scores as they are, ids as int32 with -1 for every sentinel and, where
/// experts per token vary, token_offsets, clamped to [0,P] and checked.
struct GivenSlots {
  Integers ids;               // (T,K) or (P)
  float const* gmem_weights;  // as ids, or null: no scores are written
  Integers token_offsets;     // (T+1), or null
  int64_t ids_pitch, weights_pitch, top_k;
  int64_t slots, tokens, experts;
  int32_t* gmem_ids;            // (P)
  float* gmem_scores;           // (P)
  int32_t* gmem_token_offsets;  // (T+1), or null
  uint64_t* gmem_error;
};
cudaError_t launch_given_slots(GivenSlots const& args, cudaStream_t stream);

/// Makes tables of rows that the caller grouped by expert, from offsets [E+1], ends [E] or counts [E], which are
/// checked and made ascending within [0,P]; permutations are the identity on rows 0..R-1.
struct GroupedRows {
  Integers groups;
  RowGrouping grouping;
  float const* gmem_row_scores;  // (P), or null: 1
  int64_t rows, experts;         // P, E
  RoutingView tables;
  uint64_t* gmem_error;
  ClearedWords cleared;
};
cudaError_t launch_grouped_rows(GroupedRows const& args, cudaStream_t stream);
/// Makes expert_offsets alone.
cudaError_t launch_grouped_offsets(GroupedRows const& args, cudaStream_t stream);

/// Writes zeros to the rows from *gmem_first on.
struct ZeroTail {
  int32_t const* gmem_first;
  void* gmem_rows;
  int64_t rows, row_bytes;
};
cudaError_t launch_zero_tail(ZeroTail const& args, cudaStream_t stream);

/// counts[e] = expert_offsets[e+1] - expert_offsets[e].
cudaError_t launch_expert_counts(int32_t const* gmem_expert_offsets, int64_t experts,
                                 int32_t* gmem_counts, cudaStream_t stream);

/// Copies ids [T,K], as int32 or int64, and weights from dense tables to tensors with a row pitch.
struct RouteOutputs {
  int32_t const* gmem_ids;
  float const* gmem_weights;
  int64_t rows, columns;  // T and K; 1 and P where experts per token vary
  void* gmem_ids_out;
  bool ids_out_are_int64;  // so are offsets
  int64_t ids_pitch;
  float* gmem_weights_out;
  int64_t weights_pitch;
  int32_t const* gmem_token_offsets;  // (T+1)
  void* gmem_token_offsets_out;       // (T+1) or null
  int64_t tokens;
};
cudaError_t launch_route_outputs(RouteOutputs const& args, cudaStream_t stream);

}  // namespace tessera::cuda
