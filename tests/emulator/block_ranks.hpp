// SPDX-License-Identifier: Apache-2.0
// The ends of an expert's ranks of a block, token by token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/token_rounding.hpp"
#include "cuda/host/choose_tokens.hpp"

namespace tessera::emulator {

using cuda::BlockRanks, cuda::kChoiceBlockTokens;

/// Memory for a call's workspace, every byte of that value. Elements alone would leave bytes between them as they are.
inline std::vector<BlockRanks> choice_memory(std::int64_t tokens, std::int64_t experts, int byte) {
  std::vector<BlockRanks> memory(
      cuda::choose_tokens_workspace_bytes(tokens, experts) / sizeof(BlockRanks) + 1);
  std::memset(memory.data(), byte, memory.size() * sizeof(BlockRanks));
  return memory;
}

/// ranks: of the expert, (tokens).
inline BlockRanks block_ranks(std::uint32_t const* ranks, std::int64_t tokens, std::int64_t block) {
  BlockRanks ends = {
      .members = 0, .others = 0, .worst_member = ~0u, .best_other = 0, .worst_other = ~0u};
  std::int64_t const first = block * kChoiceBlockTokens;
  for (std::int64_t t = first; t < std::min(first + kChoiceBlockTokens, tokens); ++t) {
    std::uint32_t const bit = 1u << (t - first);
    if (core::is_member(ranks[t])) {
      ends.members |= bit;
      ends.worst_member = std::min(ends.worst_member, ranks[t]);
    } else if (ranks[t] != 0) {
      ends.others |= bit;
      ends.best_other = std::max(ends.best_other, ranks[t]);
      ends.worst_other = std::min(ends.worst_other, ranks[t]);
    }
  }
  return ends;
}

inline bool same(BlockRanks const& a, BlockRanks const& b) {
  return a.members == b.members && a.others == b.others && a.worst_member == b.worst_member &&
         a.best_other == b.best_other && a.worst_other == b.worst_other;
}

/// Says whether the workspace has the ends of all its ranks, (experts,tokens); blocks of which `skips` says so may have
/// any.
template <class Skips>
bool has_ends(cuda::ChoiceWorkspace const& workspace, std::int64_t experts, std::int64_t tokens,
              Skips&& skips) {
  std::int64_t const blocks = cuda::choice_blocks(tokens);
  for (std::int64_t i = 0; i < experts * blocks; ++i) {
    BlockRanks const want =
        block_ranks(workspace.gmem_ranks + i / blocks * tokens, tokens, i % blocks);
    if (!skips(i % blocks) && !same(workspace.gmem_block_ranks[i], want)) return false;
  }
  return true;
}

}  // namespace tessera::emulator
