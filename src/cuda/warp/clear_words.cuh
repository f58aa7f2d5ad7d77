// SPDX-License-Identifier: Apache-2.0
// Clears words that whoever makes the routing tables leaves at 0.
#pragma once

namespace tessera::cuda {

// Words: ClearedWords (host/cleared_words.hpp). By all threads of a CTA.
template <class Words>
__device__ __forceinline__ void clear_words(Words const& words) {
  for (int i = static_cast<int>(threadIdx.x); i < words.count; i += static_cast<int>(blockDim.x)) {
    words.gmem[i] = 0;
  }
}

}  // namespace tessera::cuda
