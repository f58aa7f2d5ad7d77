// SPDX-License-Identifier: Apache-2.0
// mask_ranks on a CPU: what it takes away of ranks and slots, whichever lanes have a token of padding.
#include "cuda/kernels/mask_ranks.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::cuda {
namespace {

struct Config {
  static constexpr int kCtaWarps = 8;
};

struct Padding {
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> topk_ids;  // of any value: whether there is a choice decides

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(mask.size()); }
};

constexpr std::int32_t kExperts = 19, kTopK = 3;

// Every third pair is a member.
std::uint32_t rank_of(std::int64_t pair) {
  return static_cast<std::uint32_t>(pair + 1) | (pair % 3 == 0 ? 0x80000000u : 0);
}

// What is wrong, or nothing.
std::string run(Padding const& padding, bool rounds, std::uint64_t seed) {
  std::int64_t const tokens = padding.tokens(), blocks = choice_blocks(tokens);
  std::vector<BlockRanks> memory = emulator::choice_memory(tokens, kExperts, 0);
  ChooseTokensArguments p{};
  p.gmem_topk_ids = rounds ? padding.topk_ids.data() : nullptr;
  p.tokens = tokens;
  p.experts = kExperts;
  p.top_k = kTopK;
  p.gmem_workspace = memory.data();
  p.gmem_token_mask = padding.mask.data();
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  for (std::int64_t i = 0; i < tokens * kExperts; ++i) {
    workspace.gmem_ranks[i] = rank_of(i);
  }
  for (std::int64_t b = 0; b < blocks; ++b) workspace.gmem_block_slots[b] = -1;
  EXPECT_EQ(launch_mask_ranks_config<Config>(p, nullptr), cudaSuccess);
  std::string const fault = emulator::run({.seed = seed});
  if (!fault.empty()) return fault;
  std::vector<std::int32_t> slots(static_cast<std::size_t>(blocks));
  for (std::int64_t t = 0; t < tokens; ++t) {
    bool const real = padding.mask[static_cast<std::size_t>(t)] != 0;
    if (real && rounds) slots[static_cast<std::size_t>(t / kChoiceBlockTokens)] += kTopK;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      std::int64_t const at = e * tokens + t;
      if (workspace.gmem_ranks[at] == (real ? rank_of(at) : 0)) continue;
      return "rank of token " + std::to_string(t) + ", expert " + std::to_string(e);
    }
  }
  // Blocks without padding keep the ends that they have.
  auto const is_whole = [&](std::int64_t block) {
    auto const first = padding.mask.begin() + block * kChoiceBlockTokens;
    auto const end = std::min(first + kChoiceBlockTokens, padding.mask.end());
    return std::find(first, end, 0) == end;
  };
  if (!emulator::has_ends(workspace, kExperts, tokens, is_whole)) return "ends of a block";
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (workspace.gmem_block_slots[b] == slots[static_cast<std::size_t>(b)]) continue;
    return "slots of block " + std::to_string(b);
  }
  return {};
}

TEST(MaskRanks, TakesPaddingOfEveryExpertAway) {
  std::int64_t const tokens = 4 * kChoiceBlockTokens + 5;  // the last block is not full
  Padding padding{std::vector<std::uint8_t>(tokens), std::vector<std::int32_t>(tokens * kTopK)};
  // Real tokens in the first lanes of blocks, in their last, in all, and in none.
  using IsReal = bool (*)(std::int64_t);
  for (IsReal const is_real :
       {IsReal([](std::int64_t t) { return t % 32 < 3; }),
        IsReal([](std::int64_t t) { return t % 32 > 20; }),
        IsReal([](std::int64_t t) { return t % 3 != 1; }),
        IsReal([](std::int64_t) { return true; }), IsReal([](std::int64_t) { return false; })}) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      padding.mask[static_cast<std::size_t>(t)] = is_real(t) ? static_cast<std::uint8_t>(t + 1) : 0;
    }
    for (bool const rounds : {false, true}) EXPECT_EQ(run(padding, rounds, 5), "");
  }
}

}  // namespace
}  // namespace tessera::cuda
