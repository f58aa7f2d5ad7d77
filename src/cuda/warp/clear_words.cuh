// SPDX-License-Identifier: Apache-2.0
// Clears words that whoever makes the routing tables leaves at 0. Words: ClearedWords (host/cleared_words.hpp).
#pragma once

#include <cstdint>

namespace tessera::cuda {

// All threads of `ctas` CTAs call it, each with its CTA's number.
template <class Words>
__device__ __forceinline__ void clear_words(Words const& words, int cta = 0, int ctas = 1) {
  auto const threads = static_cast<int>(blockDim.x);
  for (int i = cta * threads + static_cast<int>(threadIdx.x); i < words.count;
       i += ctas * threads) {
    words.gmem[i] = 0;
  }
}

// The CTA that makes tables, the first of the grid, clears few words: more are left to clear_share().
template <class Words>
__device__ __forceinline__ void clear_beside_tables(Words const& words) {
  if (words.count <= Words::kBesideTables) clear_words(words);
}

// The CTAs that do nothing else, clearing_ctas(), call it: `cta` of them clears its share.
template <class Words>
__device__ __forceinline__ void clear_share(Words const& words, int cta) {
  int32_t const first = cta * Words::kOfCta;
  clear_words(Words{words.gmem + first, min(words.count - first, Words::kOfCta)});
}

}  // namespace tessera::cuda
