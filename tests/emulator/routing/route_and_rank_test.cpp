// SPDX-License-Identifier: Apache-2.0
// route_and_rank, from the source that GPUs get, leaves every byte that route and rank_pairs leave: choices, scores and
// the workspace of choose_tokens.
#include "cuda/kernels/route_and_rank.cuh"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/rank_pairs.cuh"
#include "cuda/kernels/route.cuh"
#include "tests/cuda/choice_cases.hpp"
#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::routing_test {
namespace {

using namespace cuda;  // NOLINT: launchers of one namespace

struct Ranked {
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
  std::vector<BlockRanks> workspace;

  bool operator==(Ranked const& other) const {
    auto const same = [](auto const& a, auto const& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
    };
    return same(ids, other.ids) && same(scores, other.scores) && same(workspace, other.workspace);
  }
};

Ranked run(ChoiceCase const& c, std::vector<float> const& logits, bool in_one,
           emulator::Schedule const& schedule) {
  auto const members = static_cast<std::size_t>(c.tokens * c.top_k);
  Ranked out{std::vector<std::int32_t>(members, -7), std::vector<float>(members, -7),
             emulator::choice_memory(c.tokens, c.experts, 0xff)};
  RouteArguments const route{.gmem_logits = logits.data(),
                             .gmem_selection_bias = nullptr,
                             .gmem_topk_ids = out.ids.data(),
                             .gmem_topk_weights = out.scores.data(),
                             .gmem_chosen_p = nullptr,
                             .tokens = c.tokens,
                             .experts = static_cast<std::int32_t>(c.experts),
                             .top_k = static_cast<std::int32_t>(c.top_k),
                             .kind = c.kind,
                             .route_scale = 1,
                             .normalize_scores = c.normalize,
                             .groups = 1,
                             .top_groups = 1};
  ChooseTokensArguments choice{};
  choice.gmem_logits = logits.data();
  choice.gmem_topk_ids = out.ids.data();
  choice.gmem_member_scores = out.scores.data();
  choice.tokens = c.tokens;
  choice.experts = route.experts;
  choice.top_k = route.top_k;
  choice.router.kind = c.kind;
  choice.groups = choice.top_groups = 1;
  choice.gmem_workspace = out.workspace.data();
  CUstream_st stream;
  EXPECT_TRUE(serves_route_and_rank<RouteAndRankConfig>(route));
  if (in_one) {
    EXPECT_EQ(launch_route_and_rank_config<RouteAndRankConfig>(route, choice, &stream),
              cudaSuccess);
  } else {
    EXPECT_EQ(launch_route_config<RouteConfig>(route, &stream), cudaSuccess);
    EXPECT_EQ(launch_rank_pairs_config<RankPairsConfig>(choice, &stream), cudaSuccess);
  }
  EXPECT_EQ(emulator::run(schedule), "");
  return out;
}

void expect_same(ChoiceCase const& c, float spread, std::size_t number) {
  SCOPED_TRACE("T " + std::to_string(c.tokens) + " E " + std::to_string(c.experts) + " K " +
               std::to_string(c.top_k) + " logits " + std::to_string(static_cast<int>(c.logits)));
  std::vector<float> logits = make_logits(c);
  for (float& logit : logits) logit *= spread;
  emulator::Schedule const& schedule = emulator::kSchedules[number % 4];
  EXPECT_TRUE(run(c, logits, true, schedule) == run(c, logits, false, schedule));
}

// As many lanes a token and values a lane as there are kernels, all of them full or not.
TEST(RouteAndRank, LeavesWhatTheTwoLeave) {
  std::size_t number = 0;
  struct Size {
    std::int64_t experts, top_k;
  };
  for (Size const size : {Size{4, 2}, Size{32, 8}, Size{60, 6}, Size{64, 8}, Size{64, 16},
                          Size{100, 12}, Size{128, 8}, Size{128, 1}, Size{132, 9}, Size{256, 16}}) {
    expect_same(
        {.tokens = 37 + static_cast<std::int64_t>(number % 3) * 27,
         .experts = size.experts,
         .top_k = size.top_k,
         .kind = number % 2 == 0 ? RouterKind::topk_softmax : RouterKind::softmax_topk_renorm},
        1, number);
    ++number;
  }
}

// Choices in doubt, terms too small for a product of reciprocals, infinities and NaN: of some tokens of a warp.
TEST(RouteAndRank, LeavesTheGeneralWayToTokensThatNeedIt) {
  std::size_t number = 0;
  for (std::int64_t const experts : {64, 128, 200}) {
    for (Logits const logits : {Logits::with_ties, Logits::with_infinities, Logits::equal}) {
      expect_same({.tokens = 45, .experts = experts, .top_k = 8, .logits = logits}, 1, number++);
    }
    for (float const spread : {8.0f, 40.0f}) {
      expect_same({.tokens = 45, .experts = experts, .top_k = 4}, spread, number++);
    }
  }
}

TEST(RouteAndRank, TakesNoTokensAndFew) {
  for (std::int64_t const tokens : {0, 1, 5}) {
    expect_same({.tokens = tokens, .experts = 64, .top_k = 2}, 1, 0);
  }
}

}  // namespace
}  // namespace tessera::routing_test
