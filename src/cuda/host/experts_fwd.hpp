// SPDX-License-Identifier: Apache-2.0
// The experts of a forward pass in one launch, where tokens are few: up_projection_fwd, down_projection_fwd, aggregate.
// Host side: the call's arguments, which are the kernel's parameters too, the words it needs, and the launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "aggregate.hpp"
#include "projection.hpp"

namespace tessera::cuda {

/// Up to so many tokens one kernel has the experts; with more the GEMMs are as fast.
/// bench/results/archive/h200/2026-11-30-few-tokens-threshold.json
constexpr int64_t kFewTokens = 8;

/// A block of rows are up to 8 of one expert, which pass with its weights; a block of columns are 16 of y.
constexpr int32_t kFewTokensRows = 8;
constexpr int32_t kFewTokensColumns = 16;
/// So many rows of weights that follow each other have to lie equally far apart.
constexpr int32_t kFewTokensWeightRows = 8;
/// The kernel keeps so many blocks of rows at most.
constexpr int64_t kFewTokensMostBlocks = 768;

/// Bounds the blocks of rows of `rows` rows from above.
constexpr int64_t few_tokens_blocks(int64_t rows, int64_t experts) {
  return std::min(rows, experts + rows / kFewTokensRows);
}
/// Counts the words of a call.
constexpr int64_t few_tokens_words(int64_t rows, int64_t experts, int64_t hidden) {
  return few_tokens_blocks(rows, experts) + (hidden + kFewTokensColumns - 1) / kFewTokensColumns;
}

/// Without an up projection rows of a are those of a launch before; without an aggregate rows of y are the result. Both
/// projections have the same rows and experts.
struct ExpertsFwdArguments {
  UpProjectionFwdArguments up;
  DownProjectionFwdArguments down;
  AggregateArguments aggregate;
  bool has_up, has_aggregate;
  int32_t* gmem_ticket;  // one int, 0 before and after every launch
  uint32_t* gmem_words;  // (few_tokens_words), 0 before and after every launch
};

/// Launches on `stream`; allocates nothing, waits for nothing. For calls that prefers_few_tokens() of layer/select.hpp
/// lets pass: there are rows; those of a, y, o, x and of the weights, which are contiguous along the reduction, are of
/// 16 bytes.
cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sm_count,
                                          cudaStream_t stream);

}  // namespace tessera::cuda
