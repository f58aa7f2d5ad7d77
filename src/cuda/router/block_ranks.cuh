// SPDX-License-Identifier: Apache-2.0
// The ends of an expert's ranks of a block of 32 tokens (host/choose_tokens.hpp).
#pragma once

#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"

namespace tessera::cuda {

// Finds those of half a block, by one thread, which is given the ranks from the last token to the first; 0 is that of
// no pair. Members are negative as signed numbers; of the others, less one, the top bit is clear, and of theirs alone.
class HalfBlockRanks {
 public:
  static constexpr int kTokens = kChoiceBlockTokens / 2;

  __device__ __forceinline__ void add(uint32_t rank) {
    uint32_t const less = rank - 1;
    members_ = members_ << 1 | rank >> 31;
    no_others_ = no_others_ << 1 | less >> 31;
    least_ = min(least_, static_cast<int>(rank));
    largest_ = max(largest_, static_cast<int>(rank));
    least_less_ = min(least_less_, less);
  }

  // Stores the block, with the thread of the next lane, which has its second half. All lanes of the warp call it.
  __device__ __forceinline__ void store(BlockRanks* gmem_block, bool exists) const {
    bool const second = arch::lane_idx() % 2 != 0;
    auto const other_half = [](auto value) { return __shfl_xor_sync(arch::kAllLanes, value, 1); };
    auto const both = [&](uint32_t half) {
      uint32_t const other = other_half(half);
      return second ? other | half << kTokens : half | other << kTokens;
    };
    constexpr uint32_t kHalf = (1u << kTokens) - 1;
    uint32_t const members = both(members_), others = both(~no_others_ & kHalf);
    int const least = min(least_, other_half(least_)),
              largest = max(largest_, other_half(largest_));
    uint32_t const least_less = min(least_less_, other_half(least_less_));
    if (!exists) return;
    auto* const gmem_words = reinterpret_cast<uint4*>(gmem_block);
    if (second) {
      gmem_words[1] = {others == 0 ? ~0u : least_less + 1, 0, 0, 0};
    } else {
      gmem_words[0] = {members, others, members == 0 ? ~0u : static_cast<uint32_t>(least),
                       static_cast<uint32_t>(largest)};
    }
  }

 private:
  uint32_t members_ = 0, no_others_ = 0;
  int least_ = 0, largest_ = 0;
  uint32_t least_less_ = ~0u;
};

// visit(e, first token of half a block, whether there is such an expert) for both halves of a block of each expert, by
// kThreads threads; all lanes of a warp are there.
template <int kThreads, class Visit>
__device__ __forceinline__ void for_each_half_block(int experts, Visit&& visit) {
  int const halves =
      (2 * experts + arch::kWarpThreads - 1) / arch::kWarpThreads * arch::kWarpThreads;
  for (int half = static_cast<int>(threadIdx.x); half < halves; half += kThreads) {
    visit(half / 2, half % 2 * HalfBlockRanks::kTokens, half < 2 * experts);
  }
}

}  // namespace tessera::cuda
