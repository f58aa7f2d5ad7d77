// SPDX-License-Identifier: Apache-2.0
// The experts of a forward pass in one launch, where tokens are few: up_projection_fwd, down_projection_fwd, aggregate.
// Host side: the call's arguments, which are the kernel's parameters too, its limits, and the launcher.
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
/// So many values of a and y are cleared at most, as words of which an int32 counts.
constexpr int64_t kFewTokensMostValues = int64_t{1} << 30;

/// Bounds the blocks of rows of `rows` rows from above.
constexpr int64_t few_tokens_blocks(int64_t rows, int64_t experts) {
  return std::min(rows, experts + rows / kFewTokensRows);
}

/// Without an aggregate rows of y are the result. Both projections have the same rows and experts. Before a launch rows
/// of a, and of y where there is an aggregate, are 0; behind it they hold the inverse of every value.
struct ExpertsFwdArguments {
  UpProjectionFwdArguments up;
  DownProjectionFwdArguments down;
  AggregateArguments aggregate;
  bool has_aggregate;
  int32_t* gmem_ticket;  // one int, 0 before and after every launch
};

/// Launches on `stream`; allocates nothing, waits for nothing. For calls that has_few_tokens() of layer/plan.hpp and
/// prefers_few_tokens() of layer/select.hpp let pass: there are rows; those of a, y, o, x and of the weights, which are
/// contiguous along the reduction, are of 16 bytes.
cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sm_count,
                                          cudaStream_t stream);

}  // namespace tessera::cuda
