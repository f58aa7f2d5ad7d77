// SPDX-License-Identifier: Apache-2.0
// When a GEMM of sm_100a takes pairs of CTAs: by arithmetic, as nothing has been measured.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// A pair reads half of the weights per row, but multiplies 256 rows at a time: below so many rows for each expert half
// of a block or more is padding.
constexpr int64_t kPairRows = 256;
constexpr bool takes_pairs_sm100(int64_t rows, int32_t experts, int sm_count) {
  return sm_count >= 2 && rows >= experts * kPairRows;
}

// No CTA of a pair is without a tile of a weight gradient: those of 128 along d are even in number.
constexpr bool wgrad_takes_pairs_sm100(int64_t hidden, int sm_count) {
  return sm_count >= 2 && (hidden + 127) / 128 % 2 == 0;
}

}  // namespace tessera::cuda
