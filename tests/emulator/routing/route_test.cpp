// SPDX-License-Identifier: Apache-2.0
// route, from the source that GPUs get, has the choices and the bits of the CPU backend; where it ranks slots for
// metadata, it counts those of each expert that come earlier among the slots of 32 tokens.
#include "cuda/kernels/route.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/router_groups.hpp"
#include "core/router_math.hpp"
#include "tests/cuda/route_cases.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::routing_test {
namespace {

using cuda::RankUnits;
using cuda::RouteArguments;
using cuda::RouteConfig;

struct Ranks {
  std::vector<std::uint16_t> counts, ranks;  // (units, pitch), (P)
};

bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
  auto const same = [](float x, float y) {
    return std::memcmp(&x, &y, sizeof x) == 0 || (x != x && y != y);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

// By the definition, of the ids that were chosen.
void expect_ranks(Ranks const& found, std::vector<std::int32_t> const& ids, int unit_slots,
                  std::size_t pitch, std::size_t experts) {
  std::vector<std::uint16_t> counts(pitch);
  auto const unit = static_cast<std::size_t>(unit_slots);
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    auto const e = static_cast<std::size_t>(ids[slot]);
    ASSERT_EQ(found.ranks[slot], counts[e]++) << "slot " << slot;
    if ((slot + 1) % unit != 0 && slot + 1 != ids.size()) continue;
    for (std::size_t expert = 0; expert < experts; ++expert) {
      ASSERT_EQ(found.counts[slot / unit * pitch + expert], counts[expert]) << "slot " << slot;
    }
    counts.assign(pitch, 0);
  }
}

void expect_same_as_cpu(RouteCase const& c, emulator::Schedule const& schedule) {
  SCOPED_TRACE(c.name);
  std::vector<float> const logits = make_logits(c);
  std::vector<float> bias(static_cast<std::size_t>(c.experts));
  for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1f * static_cast<float>(e % 7) - 0.3f;
  RouteResult const cpu = on_cpu(c, logits, c.bias ? bias.data() : nullptr);
  auto const slots = static_cast<std::size_t>(c.tokens * c.top_k);
  RouteResult out{std::vector<std::int32_t>(slots, -7), std::vector<float>(slots, -7),
                  std::vector<float>(slots, -7)};
  auto const [groups, top_groups] = core::router_groups(desc_of(c));
  RouteArguments args{.gmem_logits = logits.data(),
                      .gmem_selection_bias = c.bias ? bias.data() : nullptr,
                      .gmem_topk_ids = out.ids.data(),
                      .gmem_topk_weights = out.weights.data(),
                      .gmem_chosen_p = out.chosen_p.data(),
                      .tokens = c.tokens,
                      .experts = static_cast<std::int32_t>(c.experts),
                      .top_k = static_cast<std::int32_t>(c.top_k),
                      .kind = c.kind,
                      .route_scale = c.scale,
                      .normalize_scores = c.normalize,
                      .groups = static_cast<std::int32_t>(groups),
                      .top_groups = static_cast<std::int32_t>(top_groups)};
  std::int32_t const unit_slots = cuda::unit_slots_of<RouteConfig>(args);
  EXPECT_EQ(unit_slots != 0, c.ranked);
  auto const pitch = static_cast<std::size_t>(cuda::MetadataWorkspace::pitch_of(args.experts));
  Ranks ranks;
  if (unit_slots != 0) {
    auto const units =
        static_cast<std::size_t>(RankUnits(unit_slots).units(static_cast<std::int64_t>(slots)));
    ranks = {std::vector<std::uint16_t>(units * pitch, 9999),
             std::vector<std::uint16_t>(slots, 9999)};
    args.gmem_unit_counts = ranks.counts.data();
    args.gmem_unit_ranks = ranks.ranks.data();
  }
  ASSERT_EQ(cuda::launch_route_config<RouteConfig>(args, nullptr), cudaSuccess);
  ASSERT_EQ(emulator::run(schedule), "");
  EXPECT_EQ(out.ids, cpu.ids);
  EXPECT_TRUE(same_bits(out.weights, cpu.weights));
  if (core::has_own_p(c.kind)) EXPECT_TRUE(same_bits(out.chosen_p, cpu.chosen_p));
  if (unit_slots != 0) {
    expect_ranks(ranks, out.ids, unit_slots, pitch, static_cast<std::size_t>(c.experts));
  }
}

void expect_same_as_cpu(std::vector<RouteCase> const& cases) {
  std::size_t number = 0;
  for (RouteCase const& c : cases) expect_same_as_cpu(c, emulator::kSchedules[number++ % 4]);
}

TEST(RouteAsOnCpu, SeveralTokensOfAWarp) {
  expect_same_as_cpu({
      {.name = "no tokens", .tokens = 0, .experts = 8, .top_k = 2},
      {.name = "one token", .tokens = 1, .experts = 8, .top_k = 2},
      {.name = "K = E", .tokens = 50, .experts = 32, .top_k = 32},
      {.name = "ties, ranked",
       .tokens = 177,
       .experts = 64,
       .top_k = 8,
       .rounded_logits = true,
       .ranked = true},
      {.name = "NaN and infinities, ranked",
       .tokens = 181,
       .experts = 60,
       .top_k = 6,
       .infinities = true,
       .ranked = true},
      {.name = "one expert more than nobody chooses",
       .tokens = 517,
       .experts = 128,
       .top_k = 2,
       .one_lane = true,
       .ranked = true},
      {.name = "K = 16 of 256", .tokens = 83, .experts = 256, .top_k = 16},
      {.name = "ties, 512 experts",
       .tokens = 61,
       .experts = 512,
       .top_k = 10,
       .rounded_logits = true},
      {.name = "one of eight lanes",
       .tokens = 77,
       .experts = 256,
       .top_k = 12,
       .one_of_eight = true},
      {.name = "sigmoid, bias, ranked",
       .tokens = 333,
       .experts = 128,
       .top_k = 8,
       .kind = RouterKind::sigmoid_bias,
       .normalize = true,
       .bias = true,
       .ranked = true},
  });
}

TEST(RouteAsOnCpu, AWarpForEachToken) {
  expect_same_as_cpu({
      {.name = "one expert", .tokens = 9, .experts = 1, .top_k = 1},
      {.name = "ties, 61 experts",
       .tokens = 100,
       .experts = 61,
       .top_k = 7,
       .rounded_logits = true},
      {.name = "NaN, 130 experts", .tokens = 99, .experts = 130, .top_k = 9, .infinities = true},
      {.name = "1024 experts", .tokens = 41, .experts = 1024, .top_k = 32},
      {.name = "one lane", .tokens = 41, .experts = 1022, .top_k = 12, .one_lane = true},
      {.name = "softmax over all",
       .tokens = 90,
       .experts = 200,
       .top_k = 8,
       .kind = RouterKind::softmax_topk,
       .scale = 0.5f},
      {.name = "groups",
       .tokens = 90,
       .experts = 64,
       .top_k = 6,
       .kind = RouterKind::group_limited,
       .normalize = true,
       .bias = true},
      {.name = "groups, ties",
       .tokens = 90,
       .experts = 256,
       .top_k = 8,
       .kind = RouterKind::group_limited,
       .bias = true,
       .rounded_logits = true},
  });
}

}  // namespace
}  // namespace tessera::routing_test
