// SPDX-License-Identifier: Apache-2.0
// Token rounding on a CPU, from the source that GPUs get: rank_pairs writes the rank of every pair by its definition,
// for any number of experts, and takes the groups away that a token does not keep.
#include <cuda_runtime.h>

#include "cuda/kernels/rank_pairs.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/fp32_math.hpp"
#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::cuda {

namespace {

constexpr int kTopK = 3;

struct Choice {
  RouterKind kind;
  int tokens, experts;
  bool normalize = false;
  int groups = 1, top_groups = 1;
  float spread = 2;                       // of the logits
  std::vector<float> logits{}, scores{};  // (T,E), (T,K)
  std::vector<std::int32_t> ids{};        // (T,K)
};

Choice make_choice(Choice c) {
  std::mt19937_64 random(static_cast<std::uint64_t>(c.experts));
  std::normal_distribution<float> normal(0, c.spread);
  for (int i = 0; i < c.tokens * c.experts; ++i) c.logits.push_back(normal(random));
  for (int t = 0; t < c.tokens; ++t) {
    auto const first = static_cast<int>(random() % static_cast<unsigned>(c.experts));
    for (int k = 0; k < kTopK; ++k) {
      c.ids.push_back((first + k * (c.experts / kTopK)) % c.experts);
      c.scores.push_back(0.1f * static_cast<float>(k + 1));
    }
  }
  return c;
}

// Ranks of one token's experts by their definition.
std::vector<std::uint32_t> expected(Choice const& c, int token) {
  auto const experts = static_cast<std::size_t>(c.experts);
  float const* const logits = c.logits.data() + static_cast<std::size_t>(token) * experts;
  std::vector<float> p(experts);
  float const largest = *std::max_element(logits, logits + experts);
  bool const own_p = core::has_own_p(c.kind);
  for (std::size_t e = 0; e < experts; ++e) {
    p[e] = own_p ? core::own_p(c.kind, logits[e]) : core::exp_fp32(logits[e] - largest);
  }
  float sum = own_p ? 1.0f : core::warp_sum(p.data(), c.experts);
  auto const at = static_cast<std::size_t>(token) * kTopK;
  if (own_p && c.normalize) {
    float members[kTopK];
    for (std::size_t k = 0; k < kTopK; ++k) members[k] = p[static_cast<std::size_t>(c.ids[at + k])];
    sum = core::warp_sum(members, kTopK) + core::kNormalizeFloor;
  }
  std::vector<float> best;  // of each group: the sum of its two largest p
  std::size_t const size = experts / static_cast<std::size_t>(c.groups);
  for (std::size_t first = 0; first < experts; first += size) {
    std::vector<float> of_group(p.begin() + static_cast<std::ptrdiff_t>(first),
                                p.begin() + static_cast<std::ptrdiff_t>(first + size));
    std::partial_sort(of_group.begin(), of_group.begin() + 2, of_group.end(), std::greater<>());
    best.push_back(of_group[0] + of_group[1]);
  }
  std::vector<float> order = best;
  std::sort(order.begin(), order.end(), std::greater<>());
  float const least = order[static_cast<std::size_t>(c.top_groups) - 1];
  std::vector<std::uint32_t> ranks;
  for (std::size_t e = 0; e < experts; ++e) {
    bool const kept = c.groups == 1 || best[e / size] >= least;
    ranks.push_back(kept ? core::pair_rank(false, p[e] / sum) : 0);
  }
  for (std::size_t k = 0; k < kTopK; ++k) {
    ranks[static_cast<std::size_t>(c.ids[at + k])] = core::pair_rank(true, c.scores[at + k]);
  }
  return ranks;
}

// What is wrong, or nothing.
std::string rank(Choice const& c) {
  std::int64_t const tokens = c.tokens, blocks = choice_blocks(tokens);
  std::vector<BlockRanks> memory = emulator::choice_memory(tokens, c.experts, 0xff);
  ChooseTokensArguments p{};
  p.gmem_logits = c.logits.data();
  p.gmem_topk_ids = c.ids.data();
  p.gmem_member_scores = c.scores.data();
  p.tokens = tokens;
  p.experts = c.experts;
  p.top_k = kTopK;
  p.router.kind = c.kind;
  p.router.normalize_scores = c.normalize;
  p.groups = c.groups;
  p.top_groups = c.top_groups;
  p.gmem_workspace = memory.data();
  EXPECT_EQ(launch_rank_pairs_config<RankPairsConfig>(p, nullptr), cudaSuccess);
  std::string const fault = emulator::run({.seed = 3});
  if (!fault.empty()) return fault;
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<std::uint32_t> const ranks = expected(c, t);
    for (int e = 0; e < c.experts; ++e) {
      if (workspace.gmem_ranks[e * tokens + t] == ranks[static_cast<std::size_t>(e)]) continue;
      return "rank of token " + std::to_string(t) + ", expert " + std::to_string(e);
    }
  }
  auto const none = [](std::int64_t) { return false; };
  if (!emulator::has_ends(workspace, c.experts, tokens, none)) return "ends of a block";
  for (std::int64_t b = 0; b < blocks; ++b) {
    std::int64_t const in_block = std::min<std::int64_t>(tokens - b * kChoiceBlockTokens, 32);
    if (workspace.gmem_block_slots[b] != in_block * kTopK) return "slots of a block";
  }
  return {};
}

TEST(ChooseTokens, RanksOfAnyNumberOfExperts) {
  for (int const experts : {3, 31, 64, 65, 128, 129, 200, 256, 257, 512, 513, 1024, 1030}) {
    EXPECT_EQ(rank(make_choice({RouterKind::topk_softmax, 37, experts})), "") << experts;
    for (bool const normalize : {false, true}) {
      EXPECT_EQ(rank(make_choice({RouterKind::sigmoid_bias, 33, experts, normalize})), "")
          << experts;
    }
  }
}

// Terms of a softmax as small as fp32 has them, of some tokens or of all: those that registers cannot take.
TEST(ChooseTokens, RanksOfDistantLogits) {
  for (int const experts : {40, 64, 128, 250, 512}) {
    for (float const spread : {12.0f, 60.0f}) {
      Choice c{RouterKind::topk_softmax, 37, experts};
      c.spread = spread;
      EXPECT_EQ(rank(make_choice(c)), "") << experts;
    }
  }
}

TEST(ChooseTokens, RanksOfKeptGroupsAlone) {
  for (int const experts : {24, 96, 256, 512}) {
    EXPECT_EQ(rank(make_choice({RouterKind::group_limited, 35, experts, true, 8, 3})), "")
        << experts;
  }
}

}  // namespace
}  // namespace tessera::cuda
