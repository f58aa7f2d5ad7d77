// SPDX-License-Identifier: Apache-2.0
// choose_tokens_emit from the source that GPUs get, behind kept pairs that are made up: slots and tables by their
// definition, whether every CTA adds up what is ahead of it or scan does.
#include "cuda/kernels/choose_tokens_emit.cuh"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/kernels/choose_tokens.cuh"
#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/routing/choice_tables.hpp"

namespace tessera::routing_test {
namespace {

using namespace cuda;  // NOLINT: launchers of one namespace

// What is wrong with slots and tables where (t, e) stays if stays(t, e), or nothing.
template <class Config, class Stays>
std::string emit(std::int64_t tokens, std::int64_t experts, bool with_tables,
                 emulator::Schedule const& schedule, Stays&& stays) {
  std::vector<BlockRanks> memory = emulator::choice_memory(tokens, experts, 0);
  ChooseTokensArguments args{};
  args.tokens = tokens;
  args.experts = static_cast<std::int32_t>(experts);
  args.gmem_workspace = memory.data();
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(args);
  std::int64_t const blocks = choice_blocks(tokens);
  std::vector<std::int32_t> expected_offsets{0}, expected_ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < experts; ++e) {
      if (!stays(t, e)) continue;
      std::int64_t const block = t / kChoiceBlockTokens;
      workspace.gmem_ranks[e * tokens + t] = core::pair_rank(true, 0.25f);
      KeptTokens* const of_expert = workspace.gmem_kept + e * blocks;
      of_expert[block].tokens |= 1u << t % kChoiceBlockTokens;
      for (auto b = block + 1; b < blocks; ++b) ++of_expert[b].before;
      ++workspace.gmem_pairs[e].takes;
      ++workspace.gmem_block_slots[block];
      expected_ids.push_back(static_cast<std::int32_t>(e));
    }
    expected_offsets.push_back(static_cast<std::int32_t>(expected_ids.size()));
  }
  std::size_t const used = expected_ids.size(), all = used + 77;
  expected_ids.resize(all, -1);
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(tokens) + 1, kUntouched);
  std::vector<std::int32_t> ids(all, kUntouched);
  std::vector<float> scores(all, kUntouched);
  Tables tables;
  args.slots = static_cast<std::int64_t>(all);
  args.router.route_scale = 2;
  args.gmem_token_offsets = offsets.data();
  args.gmem_ids = ids.data();
  args.gmem_scores = scores.data();
  if (with_tables) args.tables = make_tables(experts, all, tables);
  // Without a stream they start at once: each has to wait by itself.
  if (emit_needs_scan<Config>(args) &&
      launch_choose_tokens_scan_config<ChooseTokensConfig>(args, nullptr) != cudaSuccess) {
    return "scan";
  }
  if (launch_choose_tokens_emit_config<Config>(args, nullptr) != cudaSuccess) return "emit";
  std::string const fault = emulator::run(schedule);
  if (!fault.empty()) return fault;
  if (offsets != expected_offsets) return "token_offsets differ";
  if (ids != expected_ids) return "ids differ";
  for (std::size_t i = 0; i < all; ++i) {
    if (scores[i] != (i < used ? 0.5f : 0.0f)) return "scores differ";
  }
  if (with_tables && !agree(tables, tables_of(experts, expected_ids, expected_offsets))) {
    return "routing tables differ";
  }
  return {};
}

// Threads have several blocks each, and lanes several experts.
template <int kBlocks, int kExperts>
struct FewWarps : EmitTokensConfig {
  static constexpr int kCtaWarps = 2, kMaxAddedBlocks = kBlocks, kMaxAddedExperts = kExperts;
};

bool stays_often(std::int64_t t, std::int64_t e) {
  return t % 7 != 4 && (t * 31 + e * 17) % 11 < 2;
}

TEST(EmitTokens, AddsUpOrHasSums) {
  std::size_t number = 0;
  for (std::int64_t const tokens : {0, 1, 33, 1000, 4777}) {
    for (std::int64_t const experts : {1, 19, 70}) {
      for (bool const with_tables : {true, false}) {
        if (tokens > 1000 && experts > 19) continue;
        auto const& schedule = emulator::kSchedules[number++ % 4];
        SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(experts) + " experts");
        EXPECT_EQ((emit<FewWarps<150, 70>>(tokens, experts, with_tables, schedule, stays_often)),
                  "");
        if (tokens > 1000) continue;
        EXPECT_EQ((emit<FewWarps<0, 70>>(tokens, experts, with_tables, schedule, stays_often)), "");
        EXPECT_EQ((emit<FewWarps<150, 0>>(tokens, experts, with_tables, schedule, stays_often)),
                  "");
      }
    }
  }
}

TEST(EmitTokens, AsTheLibraryDoes) {
  std::size_t number = 0;
  for (std::int64_t const experts : {128, 512, 513}) {
    EXPECT_EQ(
        emit<EmitTokensConfig>(101, experts, true, emulator::kSchedules[number++ % 4], stays_often),
        "")
        << experts;
  }
}

// There are as many experts as there may be: of every token the first, the last and others stay, or none.
TEST(EmitTokens, TheMostExperts) {
  constexpr std::int64_t kExperts = kMaxChoosingExperts;
  auto const stays = [](std::int64_t t, std::int64_t e) {
    return t % 5 != 3 && (e == 0 || e == kExperts - 1 || (e * 7 + t) % 5003 == 0);
  };
  EXPECT_EQ(emit<EmitTokensConfig>(41, kExperts, true, {.seed = 4, .burst = 8}, stays), "");
}

}  // namespace
}  // namespace tessera::routing_test
