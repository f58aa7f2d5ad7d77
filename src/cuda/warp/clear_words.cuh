// SPDX-License-Identifier: Apache-2.0
// Clears words that whoever makes the routing tables leaves at 0.
#pragma once

namespace tessera::cuda {

// Words: ClearedWords (host/cleared_words.hpp). By a CTA of at least kMaxClearedWords threads.
template <class Words>
__device__ __forceinline__ void clear_words(Words const& words) {
  if (static_cast<int>(threadIdx.x) < words.count) words.gmem[threadIdx.x] = 0;
}

}  // namespace tessera::cuda
