// SPDX-License-Identifier: Apache-2.0
// The layer of the programs over several GPUs, and what a router might have chosen.
#pragma once

#include <cstdint>
#include <random>
#include <tessera/expert_parallel.hpp>
#include <vector>

namespace examples {

constexpr std::int64_t kHidden = 1024, kIntermediate = 512, kOwnExperts = 16, kTopK = 4;
constexpr std::int64_t kUp = 2 * kIntermediate * kHidden, kDown = kHidden * kIntermediate;

inline tessera::ExpertParallelDesc desc_of(int rank, int ranks, std::int64_t tokens) {
  return {.rank = rank,
          .ranks = ranks,
          .max_tokens = tokens,
          .hidden = kHidden,
          .intermediate = kIntermediate,
          .experts = kOwnExperts * ranks,
          .top_k = kTopK};
}

/// [tokens,kTopK]
struct Choices {
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
};
/// A token's experts differ; ranks get unequal shares.
inline Choices draw(std::int64_t tokens, std::int64_t experts, int seed) {
  Choices drawn;
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  for (std::int64_t i = 0; i < tokens * kTopK; ++i) {
    std::int64_t const before = i % kTopK == 0 ? -1 : drawn.ids.back();
    auto const step = static_cast<std::int64_t>(random()) % (experts / kTopK);
    drawn.ids.push_back(static_cast<std::int32_t>(before + 1 + step));
    drawn.scores.push_back(0x1p-4f + 0x1p-32f * static_cast<float>(random()));
  }
  return drawn;
}

}  // namespace examples
