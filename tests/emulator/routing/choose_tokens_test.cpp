// SPDX-License-Identifier: Apache-2.0
// route and choose_tokens, from the sources that GPUs get, leave the slots, scores and counts of the CPU backend, bit
// for bit, and the routing tables of these slots by their definition.
#include "cuda/kernels/choose_tokens.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "core/router_groups.hpp"
#include "cuda/kernels/choose_tokens_emit.cuh"
#include "cuda/kernels/mask_ranks.cuh"
#include "cuda/kernels/rank_pairs.cuh"
#include "cuda/kernels/route.cuh"
#include "cuda/kernels/route_and_rank.cuh"
#include "tests/cuda/choice_cases.hpp"
#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/routing/choice_tables.hpp"

namespace tessera::routing_test {

void PrintTo(ChoiceCase const& c, std::ostream* out) {
  *out << "T " << c.tokens << " E " << c.experts << " K " << c.top_k << " router "
       << static_cast<int>(c.kind) << " round " << static_cast<int>(c.round) << " tile " << c.tile
       << " logits " << static_cast<int>(c.logits) << (c.padded ? " padded" : "");
}

namespace {

using namespace cuda;  // NOLINT: launchers of one namespace

struct Choice {
  std::vector<std::int32_t> members;
  std::vector<float> member_scores;
  ChoiceResult result;
  Tables tables;
};

struct Wide : ChooseTokensConfig {
  using Emit = EmitTokensConfig;
};
// Emit has its sums from scan where there are more blocks than one.
struct FewThreads : ChooseTokensConfig {
  static constexpr int kMaxWideExperts = 0;
  struct Emit : EmitTokensConfig {
    static constexpr int kMaxAddedBlocks = 1;
  };
};
// Ranks do not fit shared memory, and there are more words than keep has at a time.
struct Narrow : FewThreads {
  static constexpr int kMaxTokens = 64;
};

// Launches both; returns what the emulator found wrong, or nothing.
template <class Config>
std::string choose(ChoiceCase const& c, emulator::Schedule const& schedule, bool with_tables,
                   Choice& out) {
  MoeDesc const desc = desc_of(c);
  auto const slots = static_cast<std::size_t>(desc.num_slots());
  auto const members = static_cast<std::size_t>(c.tokens * c.top_k);
  std::vector<float> const logits = make_logits(c), bias = make_bias(c);
  std::vector<std::uint8_t> const mask = make_mask(c);
  out.members.assign(members, kUntouched);
  out.member_scores.assign(members, kUntouched);
  ChoiceResult& result = out.result;
  result.token_offsets.assign(static_cast<std::size_t>(c.tokens) + 1, kUntouched);
  result.ids.assign(slots, kUntouched);
  result.scores.assign(slots, kUntouched);
  result.topk_counts.assign(static_cast<std::size_t>(c.experts), kUntouched);
  ChoiceTables const tables = make_tables(c.experts, slots, out.tables);
  auto const [groups, top_groups] =
      c.kind == RouterKind::group_limited ? core::router_groups(desc) : core::RouterGroups{};
  float const* const gmem_bias = c.bias ? bias.data() : nullptr;
  bool const chooses = desc.experts_choose();
  CUstream_st stream;
  RouteArguments const route{.gmem_logits = logits.data(),
                             .gmem_selection_bias = gmem_bias,
                             .gmem_topk_ids = out.members.data(),
                             .gmem_topk_weights = out.member_scores.data(),
                             .gmem_chosen_p = nullptr,
                             .tokens = c.tokens,
                             .experts = static_cast<std::int32_t>(c.experts),
                             .top_k = static_cast<std::int32_t>(c.top_k),
                             .kind = c.kind,
                             .route_scale = 1,
                             .normalize_scores = c.normalize,
                             .groups = static_cast<std::int32_t>(groups),
                             .top_groups = static_cast<std::int32_t>(top_groups)};
  std::vector<BlockRanks> workspace = emulator::choice_memory(c.tokens, c.experts, 0xff);
  ChooseTokensArguments const args{.gmem_logits = logits.data(),
                                   .gmem_selection_bias = gmem_bias,
                                   .gmem_topk_ids = chooses ? nullptr : out.members.data(),
                                   .gmem_member_scores = out.member_scores.data(),
                                   .tokens = c.tokens,
                                   .experts = static_cast<std::int32_t>(c.experts),
                                   .top_k = static_cast<std::int32_t>(c.top_k),
                                   .router = desc.router,
                                   .capacity = desc.router.capacity,
                                   .groups = static_cast<std::int32_t>(groups),
                                   .top_groups = static_cast<std::int32_t>(top_groups),
                                   .slots = desc.num_slots(),
                                   .gmem_token_offsets = result.token_offsets.data(),
                                   .gmem_ids = result.ids.data(),
                                   .gmem_scores = result.scores.data(),
                                   .gmem_topk_counts = result.topk_counts.data(),
                                   .gmem_workspace = workspace.data(),
                                   .gmem_token_mask = c.padded ? mask.data() : nullptr,
                                   .tables = with_tables ? tables : ChoiceTables{}};
  // As the layer does: in one where it can.
  if (!chooses && serves_route_and_rank<RouteAndRankConfig>(route)) {
    if (launch_route_and_rank_config<RouteAndRankConfig>(route, args, &stream) != cudaSuccess) {
      return "route_and_rank";
    }
  } else {
    if (!chooses && launch_route_config<RouteConfig>(route, &stream) != cudaSuccess) return "route";
    if (launch_rank_pairs_config<RankPairsConfig>(args, &stream) != cudaSuccess) {
      return "rank_pairs";
    }
  }
  if (c.padded && launch_mask_ranks_config<RankPairsConfig>(args, &stream) != cudaSuccess) {
    return "mask_ranks";
  }
  // Without a stream they all start at once: each has to wait by itself.
  using Emit = typename Config::Emit;
  if (launch_choose_tokens_keep_config<Config>(args, nullptr) != cudaSuccess ||
      (emit_needs_scan<Emit>(args) &&
       launch_choose_tokens_scan_config<Config>(args, nullptr) != cudaSuccess) ||
      launch_choose_tokens_emit_config<Emit>(args, nullptr) != cudaSuccess) {
    return "choose_tokens";
  }
  return emulator::run(schedule);
}

bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
  auto const same = [](float x, float y) {
    return std::memcmp(&x, &y, sizeof x) == 0 || (x != x && y != y);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

template <class Config = Wide>
void expect_same_as_cpu(ChoiceCase const& c, emulator::Schedule const& schedule,
                        bool with_tables = true) {
  SCOPED_TRACE(::testing::PrintToString(c));
  std::vector<float> const bias = make_bias(c);
  ChoiceResult const cpu = on_cpu(c, make_logits(c), c.bias ? bias.data() : nullptr);
  Choice emulated;
  ASSERT_EQ(choose<Config>(c, schedule, with_tables, emulated), "");
  EXPECT_EQ(emulated.result.topk_counts, cpu.topk_counts);
  EXPECT_EQ(emulated.result.token_offsets, cpu.token_offsets);
  EXPECT_EQ(emulated.result.ids, cpu.ids);
  EXPECT_TRUE(same_bits(emulated.result.scores, cpu.scores));
  if (with_tables) {
    EXPECT_TRUE(agree(emulated.tables, tables_of(c.experts, cpu.ids, cpu.token_offsets)));
  } else {
    EXPECT_EQ(emulated.tables.words.front(), kNotCleared);
    EXPECT_EQ(emulated.tables.expert_offsets.front(), kUntouched);
  }
}

constexpr Rounding kRoundings[] = {Rounding::nr_f,      Rounding::sr_f, Rounding::nr_s,
                                   Rounding::balance_f, Rounding::up,   Rounding::down};

// In turns of one and of many, with CTAs that fall behind.
emulator::Schedule schedule_of(std::size_t number) { return emulator::kSchedules[number % 4]; }

TEST(ChooseTokensAsOnCpu, EveryRounding) {
  std::size_t number = 0;
  for (Rounding const round : kRoundings) {
    for (Logits const logits : {Logits::random, Logits::with_ties, Logits::with_infinities,
                                Logits::equal, Logits::to_some}) {
      bool const padded = number % 2 == 1;
      expect_same_as_cpu({.tokens = 139,
                          .experts = 7,
                          .top_k = 3,
                          .round = round,
                          .tile = 16,
                          .logits = logits,
                          .padded = padded},
                         schedule_of(number++));
    }
  }
}

TEST(ChooseTokensAsOnCpu, EveryRouter) {
  std::size_t number = 0;
  for (RouterKind const kind :
       {RouterKind::softmax_topk, RouterKind::softmax_topk_renorm, RouterKind::sigmoid_bias,
        RouterKind::group_limited, RouterKind::sqrtsoftplus}) {
    for (Rounding const round : {Rounding::nr_f, Rounding::nr_s}) {
      bool const odd = number % 2 == 1;
      expect_same_as_cpu<FewThreads>({.tokens = 101,
                                      .experts = 24,
                                      .top_k = 3,
                                      .kind = kind,
                                      .round = round,
                                      .tile = 16,
                                      .normalize = odd,
                                      .bias = kind >= RouterKind::sigmoid_bias,
                                      .scale = odd ? 2.5f : 1.0f,
                                      .padded = number % 3 == 1},
                                     schedule_of(number));
      ++number;
    }
  }
}

TEST(ChooseTokensAsOnCpu, FewTokensAndNone) {
  std::size_t number = 0;
  for (Rounding const round : kRoundings) {
    for (std::int64_t const tokens : {0, 5, 33}) {
      expect_same_as_cpu<FewThreads>({.tokens = tokens,
                                      .experts = 8,
                                      .top_k = 2,
                                      .round = round,
                                      .tile = 4,
                                      .padded = number % 3 == 2},
                                     schedule_of(number));
      ++number;
    }
  }
}

// As the router alone has them, without a layer behind.
TEST(ChooseTokensAsOnCpu, WithoutTables) {
  std::size_t number = 0;
  for (Rounding const round : {Rounding::nr_f, Rounding::balance_f}) {
    expect_same_as_cpu(
        {.tokens = 75, .experts = 9, .top_k = 3, .round = round, .tile = 8, .padded = number == 1},
        schedule_of(number++), false);
  }
}

TEST(ChooseTokensAsOnCpu, RanksThatDoNotFit) {
  std::size_t number = 0;
  for (Rounding const round : {Rounding::nr_f, Rounding::nr_s, Rounding::balance_f}) {
    expect_same_as_cpu<Narrow>({.tokens = 203,
                                .experts = 5,
                                .top_k = 2,
                                .round = round,
                                .tile = 16,
                                .logits = number == 1 ? Logits::with_ties : Logits::random,
                                .padded = number == 2},
                               schedule_of(number));
    ++number;
  }
}

// More experts than lanes have bits and registers, each chosen or not; K from 1 to E.
TEST(ChooseTokensAsOnCpu, AnyNumberOfExperts) {
  std::size_t number = 0;
  for (std::int64_t const experts : {1, 31, 33, 65}) {
    for (std::int64_t const top_k : {std::int64_t{1}, std::min<std::int64_t>(experts, 32)}) {
      expect_same_as_cpu({.tokens = 45,
                          .experts = experts,
                          .top_k = top_k,
                          .round = kRoundings[number % 6],
                          .tile = 8,
                          .logits = number % 2 == 0 ? Logits::random : Logits::with_ties},
                         schedule_of(number));
      ++number;
    }
  }
}

TEST(ChooseTokensAsOnCpu, ExpertsThatChoose) {
  std::size_t number = 0;
  for (Logits const logits :
       {Logits::random, Logits::with_ties, Logits::with_infinities, Logits::equal}) {
    for (std::int64_t const capacity : {0, 1, 100}) {
      expect_same_as_cpu<FewThreads>({.tokens = 121,
                                      .experts = 9,
                                      .top_k = 4,
                                      .kind = RouterKind::expert_choice,
                                      .logits = logits,
                                      .scale = 1.5f,
                                      .capacity = capacity,
                                      .padded = number % 2 == 1},
                                     schedule_of(number));
      ++number;
    }
  }
}

// Ranks that the threads of a CTA have several of, all of them in question: with equal logits no thread's nearest
// rank tells anything.
TEST(ChooseTokensAsOnCpu, ManyTokens) {
  std::size_t number = 0;
  for (Rounding const round : {Rounding::nr_f, Rounding::nr_s, Rounding::balance_f}) {
    for (Logits const logits : {Logits::random, Logits::with_ties, Logits::equal}) {
      expect_same_as_cpu({.tokens = 1177,
                          .experts = 3,
                          .top_k = 2,
                          .round = round,
                          .logits = logits,
                          .padded = number % 2 == 1},
                         schedule_of(number));
      ++number;
    }
  }
}

}  // namespace
}  // namespace tessera::routing_test
