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

/// Up to so many tokens one kernel has the experts; with more the GEMMs are as fast, and hide more of the router.
constexpr int64_t kFewTokens = 8;

/// A block of rows are up to 8 of one expert, which pass with its weights; a block of columns are 16 of y.
constexpr int32_t kFewTokensRows = 8;
constexpr int32_t kFewTokensColumns = 16;
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

/// Any of the three may be missing, but for these: an aggregate needs the down projection, and that needs rows of a,
/// from the up projection or from a launch before.
struct ExpertsFwdArguments {
  UpProjectionFwdArguments up;
  DownProjectionFwdArguments down;
  AggregateArguments aggregate;
  bool has_up, has_down, has_aggregate;
  int32_t* gmem_ticket;  // one int, 0 before and after every launch
  /// (few_tokens_words) where there is more than an up projection, 0 before and after every launch.
  uint32_t* gmem_words;
};

/// Launches on `stream`; allocates nothing, waits for nothing. For calls that prefers_few_tokens() of layer/select.hpp
/// lets pass: a call with an aggregate has rows; rows of a, y, o, x and of the weights, which are contiguous along the
/// reduction, are of 16 bytes.
cudaError_t launch_experts_fwd_few_tokens(ExpertsFwdArguments const& args, int sm_count,
                                          cudaStream_t stream);
/// The up projection alone.
cudaError_t launch_up_projection_fwd_few_tokens(UpProjectionFwdArguments const& args, int sm_count,
                                                cudaStream_t stream);

}  // namespace tessera::cuda
