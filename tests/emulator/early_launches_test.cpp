// SPDX-License-Identifier: Apache-2.0
// The launches ahead of the experts, each of which may start before the one ahead of it has ended: run at once they
// leave every byte that they leave one after the other.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "cuda/kernels/metadata.cuh"
#include "cuda/kernels/rank_pairs.cuh"
#include "cuda/kernels/route.cuh"
#include "cuda/kernels/route_and_rank.cuh"
#include "cuda/kernels/router_logits.cuh"
#include "cuda/kernels/up_projection_fwd.cuh"
#include "cuda/tuning/gemm.hpp"
#include "tests/emulator/block_ranks.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::routing_test {
namespace {

using namespace cuda;  // NOLINT: launchers of one namespace
using emulator::Bits;
using emulator::fill;
using emulator::Memory;

constexpr int kHidden = 64, kIntermediate = 64, kTopK = 4;
constexpr ActivationKind kKind = ActivationKind::swiglu;

enum class Tables { by_units_of_route, by_units_of_metadata, in_one_block, none };

struct Chain {
  int tokens, experts;
  Tables tables;
  bool ranks_pairs = false;  // route and rank_pairs, or both in one
};

using Launches = std::vector<std::function<cudaError_t()>>;

template <class T>
std::vector<std::byte> bytes_of(Memory<T> const& memory) {
  auto const* const bytes = reinterpret_cast<std::byte const*>(memory.get());
  return {bytes, bytes + memory.size() * sizeof(T)};
}

// Memory of a pass. Until it is written no slot has an expert, or all have the first, and no expert has a row.
class Pass {
 public:
  explicit Pass(Chain const& c) : c_(c) {
    emulator::set_compiled_cluster(reinterpret_cast<void const*>(metadata_scatter),
                                   MetadataConfig::kCluster);
    fill(x_.get(), static_cast<std::int64_t>(x_.size()), 1, 1.0f);
    fill(w_router_.get(), static_cast<std::int64_t>(w_router_.size()), 2, 1.0f);
    fill(w_up_.get(), static_cast<std::int64_t>(w_up_.size()), 3, 0.25f);
  }

  void run(bool at_once, emulator::Schedule const& schedule) {
    for (auto const& launch : launches()) {
      ASSERT_EQ(launch(), cudaSuccess);
      if (!at_once) {
        ASSERT_EQ(emulator::run(schedule), "");
      }
    }
    if (at_once) {
      ASSERT_EQ(emulator::run(schedule), "");
    }
  }

  std::vector<std::vector<std::byte>> result() const {
    return {bytes_of(ids_),   bytes_of(scores_), bytes_of(offsets_), bytes_of(permutation_),
            bytes_of(index_), bytes_of(places_), bytes_of(h_),       bytes_of(a_),
            choice_ranks(),   bytes_of(words_)};
  }

 private:
  std::int64_t slots() const { return std::int64_t{c_.tokens} * kTopK; }

  Launches launches() {
    Launches all{[this] { return launch_logits(); }};
    if (c_.ranks_pairs && serves_route_and_rank<RouteAndRankConfig>(route())) {
      all.emplace_back([this] {
        return launch_route_and_rank_config<RouteAndRankConfig>(route(), choice(), nullptr);
      });
      return all;
    }
    all.emplace_back([this] { return launch_route_config<RouteConfig>(route(), nullptr); });
    if (c_.ranks_pairs) {
      all.emplace_back(
          [this] { return launch_rank_pairs_config<RankPairsConfig>(choice(), nullptr); });
    }
    if (c_.tables == Tables::none) return all;
    all.emplace_back(
        [this] { return launch_metadata_config<MetadataConfig>(metadata(), nullptr); });
    all.emplace_back([this] { return launch_up(); });
    return all;
  }

  cudaError_t launch_logits() {
    return launch_router_logits_config<RouterLogitsNarrow>(
        {.x = {.gmem = x_.get(), .rows = c_.tokens, .pitch = kHidden},
         .w_router = {.gmem = w_router_.get(), .rows = c_.experts, .pitch = kHidden},
         .gmem_b_router = nullptr,
         .gmem_logits = logits_.get(),
         .hidden = kHidden,
         .experts = c_.experts},
        2, nullptr);
  }

  RouteArguments route() {
    RouteArguments args{.gmem_logits = logits_.get(),
                        .gmem_selection_bias = nullptr,
                        .gmem_topk_ids = ids_.get(),
                        .gmem_topk_weights = scores_.get(),
                        .gmem_chosen_p = nullptr,
                        .tokens = c_.tokens,
                        .experts = c_.experts,
                        .top_k = kTopK,
                        .kind = RouterKind::topk_softmax,
                        .route_scale = 1,
                        .normalize_scores = false,
                        .groups = 1,
                        .top_groups = 1};
    if (c_.tables == Tables::by_units_of_route) {
      auto const ranked =
          MetadataWorkspace::of(workspace_.get(), slots(), c_.experts, kRankedTokens * kTopK);
      args.gmem_unit_counts = ranked.gmem_counts;
      args.gmem_unit_ranks = ranked.gmem_ranks;
    }
    return args;
  }

  ChooseTokensArguments choice() {
    ChooseTokensArguments args{};
    args.gmem_logits = logits_.get();
    args.gmem_topk_ids = ids_.get();
    args.gmem_member_scores = scores_.get();
    args.tokens = c_.tokens;
    args.experts = c_.experts;
    args.top_k = kTopK;
    args.router.kind = RouterKind::topk_softmax;
    args.groups = args.top_groups = 1;
    args.gmem_workspace = ranks_.data();
    return args;
  }

  MetadataArguments metadata() {
    return {.gmem_ids = ids_.get(),
            .ids_are_int64 = false,
            .gmem_token_offsets = nullptr,
            .slots = slots(),
            .tokens = c_.tokens,
            .top_k = kTopK,
            .experts = c_.experts,
            .gmem_expert_offsets = offsets_.get(),
            .gmem_sort_permutation = permutation_.get(),
            .gmem_gather_index = index_.get(),
            .gmem_inverse_permutation = places_.get(),
            .gmem_workspace = workspace_.get(),
            .cleared = {words_.get(), static_cast<std::int32_t>(words_.size())},
            .unit_slots = c_.tables == Tables::by_units_of_route ? kRankedTokens * kTopK : 0};
  }

  cudaError_t launch_up() {
    constexpr std::int64_t kMatrix = std::int64_t{kHidden} * kIntermediate;
    UpProjectionFwdArguments args{};
    args.x = {.gmem = x_.get(), .rows = c_.tokens, .pitch = kHidden};
    args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = offsets_.get();
    for (int half = 0; half < 2; ++half) {
      args.w_up[half] = {.gmem = w_up_.get() + half * kMatrix,
                         .expert_stride = 2 * kMatrix,
                         .row_stride = kHidden,
                         .column_stride = 1,
                         .block = kIntermediate};
    }
    args.activation = {.kind = kKind};
    args.gmem_h = h_.get();
    args.gmem_a = a_.get();
    args.rows = slots();
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = c_.experts;
    args.gmem_tile_counter = words_.get();
    using Config = UpProjectionFwdConfig<kKind, gemm::Loader::kGather, gemm::Major::kK,
                                         gemm::Boxes::kAny, Columns::kHalves>;
    return launch_up_projection_fwd_config<Config>(args, 2, nullptr);
  }

  std::vector<std::byte> choice_ranks() const {
    auto const* const bytes = reinterpret_cast<std::byte const*>(ranks_.data());
    return {bytes, bytes + ranks_.size() * sizeof ranks_[0]};
  }

  Chain c_;
  Memory<Bits> x_{std::int64_t{c_.tokens} * kHidden}, w_router_{std::int64_t{c_.experts} * kHidden},
      w_up_{std::int64_t{c_.experts} * 2 * kIntermediate * kHidden};
  Memory<float> logits_{std::int64_t{c_.tokens} * c_.experts, 0}, scores_{slots(), 0};
  Memory<std::int32_t> ids_{slots(), c_.ranks_pairs ? 0 : 0xff}, offsets_{c_.experts + 1, 0},
      permutation_{slots(), 0}, index_{slots(), 0}, places_{slots(), 0};
  // A counter, and in a block of slots more than the CTA with the tables clears.
  Memory<std::int32_t> words_{c_.tables == Tables::in_one_block ? 9001 : 1};
  Memory<std::uint16_t> workspace_{
      static_cast<std::int64_t>(
          metadata_workspace_bytes(slots(), c_.experts, kRankedTokens* kTopK) /
          sizeof(std::uint16_t)),
      0};
  Memory<Bits> h_{slots() * 2 * kIntermediate, 0}, a_{slots() * kIntermediate, 0};
  std::vector<BlockRanks> ranks_ = emulator::choice_memory(c_.tokens, c_.experts, 0);
};

void expect_same(Chain const& chain) {
  Pass one_by_one(chain);
  one_by_one.run(false, {.seed = 5});
  auto const wanted = one_by_one.result();
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Pass at_once(chain);
    at_once.run(true, schedule);
    EXPECT_TRUE(at_once.result() == wanted) << "passes differ, seed " << schedule.seed;
  }
}

TEST(EarlyLaunches, OfManyTokens) { expect_same({300, 8, Tables::by_units_of_route}); }
TEST(EarlyLaunches, OfSlotsThatMetadataRanks) {
  expect_same({300, 8, Tables::by_units_of_metadata});
}
TEST(EarlyLaunches, OfFewTokens) { expect_same({40, 8, Tables::in_one_block}); }
TEST(EarlyLaunches, OfManyExperts) { expect_same({20, 600, Tables::none}); }
TEST(EarlyLaunches, OfRanksBesideTheChoice) { expect_same({70, 8, Tables::none, true}); }
TEST(EarlyLaunches, OfRanksBehindTheChoice) { expect_same({70, 264, Tables::none, true}); }

}  // namespace
}  // namespace tessera::routing_test
