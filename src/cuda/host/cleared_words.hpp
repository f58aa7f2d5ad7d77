// SPDX-License-Identifier: Apache-2.0
// Tile counters, words between two kernels, and values of experts_fwd_few_tokens that say by themselves that they are
// there lie in the caller's workspace, which holds anything. The last kernel that makes the tables clears them: every
// kernel that reads one comes behind it, and none before it does. Run alone, in any order, a kernel finds its tile
// counter at 0, as all leave it. Only down_projection_fwd needs an up_projection_fwd since the words were cleared: it
// would wait for what nobody hands over.
#pragma once

#include <cstdint>

namespace tessera::cuda {

struct ClearedWords {
  int32_t* gmem = nullptr;
  int32_t count = 0;

  /// More words than a CTA clears beside its tables are left to CTAs that do nothing else, each of which has so many.
  static constexpr int32_t kBesideTables = 256, kOfCta = 4096;
};

/// Counts these CTAs.
constexpr unsigned clearing_ctas(ClearedWords const& words) {
  constexpr int32_t kOfCta = ClearedWords::kOfCta;
  return words.count <= ClearedWords::kBesideTables
             ? 0
             : static_cast<unsigned>((words.count + kOfCta - 1) / kOfCta);
}

}  // namespace tessera::cuda
