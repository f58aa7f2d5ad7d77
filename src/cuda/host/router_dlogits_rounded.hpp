// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding, of routers without a softmax over all: dscores and dlogits.
// Host side: the call's arguments, which are the kernel's parameters too, and the launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "router_backward.hpp"

namespace tessera::cuda {

/// Lists the tokens of which an expert without a row of theirs may have a dlogit: one that was dropped, or any, where a
/// softmax over all scores an expert that was added. Their row_dlogits are 0, and router_dgrad makes their part of dx.
struct ListedTokens {
  int32_t* gmem_tokens = nullptr;     // (T) in any order
  int32_t* gmem_offsets = nullptr;    // {0, how many}, of which the second is written
  uint8_t* gmem_is_listed = nullptr;  // (T) 1 or 0
  uint64_t* gmem_counter = nullptr;   // one word, 0 before and after every launch
};

/// Both, from the partial sums to dlogits; `rounded` reads the dscores that `dscores` makes.
struct RoundedGradientArguments {
  DscoresArguments dscores;
  RoundedDlogitsArguments rounded;
  ListedTokens listed;        // with row_dlogits, which only the fast kernel serves
  bool starts_early = false;  // while the previous kernel of the stream ends
};

/// The fast kernel, for calls that refuse() of layer/select.hpp lets pass: launches on `stream`; allocates nothing,
/// waits for nothing, and leaves the scratch of `rounded` alone.
cudaError_t launch_router_dlogits_rounded(RoundedGradientArguments const& args,
                                          cudaStream_t stream);

}  // namespace tessera::cuda
