// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding, from the source that GPUs get, beside the CPU backend and its plain twin, of
// which it has the bits: members that were dropped, experts that were added, tokens with no slot or more than a warp
// has lanes, padding, slots of no token; dlogits by row, and the tokens that are listed instead.
#include <gtest/gtest.h>

#include "cuda/kernels/router_dlogits_rounded.cuh"
#include "cuda/plain/router_dlogits.cu"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "cpu/parallel/ops.hpp"
#include "tests/cuda/rounded_dlogits_cases.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::routing_test {
namespace {

std::vector<float> on_cpu(RoundedCase const& c, RoundedData& data) {
  MoeDesc desc;
  desc.shape = {c.tokens, 8, 8, c.experts, c.top_k};
  desc.router.kind = c.kind;
  desc.router.round = Rounding::nr_f;
  desc.router.route_scale = kRouteScale;
  desc.router.normalize_scores = c.normalize;
  RoutingView routing;
  routing.scores = data.scores.data();
  routing.token_offsets = data.offsets.data();
  routing.topk_ids = data.ids.data();
  routing.logits = data.logits.data();
  routing.unrounded_ids = data.unrounded.data();
  std::vector<float> out(static_cast<std::size_t>(c.tokens * c.experts));
  core::ThreadPool pool(1);
  std::int64_t const floats = cpu::router_dlogits_scratch(desc);
  std::vector<float> scratch(static_cast<std::size_t>(floats));
  cpu::router_dlogits(desc, routing,
                      {.dscores = data.dscores.data(),
                       .dlogits = {out.data(), c.experts},
                       .token_mask = data.mask.data()},
                      {pool, scratch.data(), floats});
  for (std::size_t i = 0; c.aux && i < out.size(); ++i) {
    if (data.mask[i / static_cast<std::size_t>(c.experts)] != 0) out[i] += data.aux[i];
  }
  return out;
}

constexpr std::uint32_t kNothing = 0x7fc12345;  // a NaN that no kernel writes

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
bool is_nothing(float value) { return bits_of(value) == kNothing; }

// A call with rows makes this beside dlogits. Lists have room for a token that nobody should name.
struct Listed {
  explicit Listed(RoundedCase const& c, std::size_t slots)
      : row_dlogits(slots, std::bit_cast<float>(kNothing)),
        tokens(static_cast<std::size_t>(c.tokens) + 1, -1),
        is_listed(static_cast<std::size_t>(c.tokens) + 1, 7) {}

  void give_to(cuda::RoundedGradientArguments& args) {
    args.rounded.dlogits.gmem_row_dlogits = row_dlogits.data();
    args.rounded.dlogits.gmem_inverse_permutation = args.dscores.gmem_inverse_permutation;
    args.listed = {.gmem_tokens = tokens.data(),
                   .gmem_offsets = offsets,
                   .gmem_is_listed = is_listed.data(),
                   .gmem_counter = &counter};
  }
  void expect_right(RoundedCase const& c, RoundedData const& data, std::vector<float> const& dl) {
    std::vector<bool> const wanted = listed_tokens(c, data);
    std::vector<std::int32_t> listed;
    for (std::size_t t = 0; t < wanted.size(); ++t) {
      if (wanted[t]) listed.push_back(static_cast<std::int32_t>(t));
      ASSERT_EQ(is_listed[t], wanted[t] ? 1 : 0) << t;
      for (auto i = static_cast<std::size_t>(data.offsets[t]);
           i < static_cast<std::size_t>(data.offsets[t + 1]); ++i) {
        std::size_t const at =
            t * static_cast<std::size_t>(c.experts) + static_cast<std::size_t>(data.ids[i]);
        float& value = row_dlogits[static_cast<std::size_t>(data.rows[i])];
        ASSERT_EQ(bits_of(value), bits_of(wanted[t] ? 0.0f : dl[at])) << t << ", " << data.ids[i];
        value = std::bit_cast<float>(kNothing);
      }
    }
    EXPECT_TRUE(std::all_of(row_dlogits.begin(), row_dlogits.end(), is_nothing));
    EXPECT_EQ(is_listed.back(), 7);
    auto const rest = tokens.begin() + static_cast<std::ptrdiff_t>(listed.size());
    std::sort(tokens.begin(), rest);
    EXPECT_EQ(std::vector(tokens.begin(), rest), listed);
    EXPECT_TRUE(std::all_of(rest, tokens.end(), [](std::int32_t token) { return token == -1; }));
    if (c.tokens > 0) EXPECT_EQ(offsets[1], static_cast<std::int32_t>(listed.size()));
    EXPECT_EQ(offsets[0], 0);
    EXPECT_EQ(counter, 0u);
  }

  std::vector<float> row_dlogits;
  std::vector<std::int32_t> tokens;
  std::vector<std::uint8_t> is_listed;
  std::int32_t offsets[2] = {0, -1};
  std::uint64_t counter = 0;
};

// The dlogits of the plain twin, which reads the dscores that are there.
std::vector<float> by_plain_twin(RoundedCase const& c, cuda::RoundedGradientArguments args) {
  auto const pairs = static_cast<std::size_t>(c.tokens * c.experts);
  auto const members = static_cast<std::size_t>(c.tokens * c.top_k);
  std::vector<float> out(pairs), dlogits(pairs), member_scores(members), member_dscores(members);
  std::vector<std::int32_t> added(static_cast<std::size_t>(args.dscores.slots));
  args.rounded.dlogits.gmem_dlogits = dlogits.data();
  args.rounded.dlogits.gmem_copy = out.data();
  args.rounded.gmem_member_scores = member_scores.data();
  args.rounded.gmem_member_dscores = member_dscores.data();
  args.rounded.gmem_added_ids = added.data();
  EXPECT_EQ(cuda::launch_router_dlogits_rounded_plain(args.rounded, nullptr), cudaSuccess);
  EXPECT_EQ(emulator::run(emulator::kSchedules[0]), "");
  return out;
}

void expect_near_cpu(RoundedCase const& c, emulator::Schedule const& schedule) {
  SCOPED_TRACE(c.name);
  RoundedData data = make_rounded_data(c);
  std::vector<float> const cpu = on_cpu(c, data);
  std::vector<float> dscores(data.ids.size(), std::nanf("")), copy(cpu.size(), std::nanf(""));
  struct alignas(16) Four {
    float value[4] = {NAN, NAN, NAN, NAN};
  };
  std::vector<Four> dlogits(cpu.size() / 4 + 1);
  std::vector<std::uint64_t> rounded(cpu.size() / 4 + 1);
  cuda::RoundedGradientArguments args{};
  args.dscores.gmem_ds_partials = data.partials.data();
  args.dscores.groups = kGroups;
  args.dscores.gmem_inverse_permutation = data.rows.data();
  args.dscores.gmem_dscores = dscores.data();
  args.dscores.slots = static_cast<std::int64_t>(data.ids.size());
  args.dscores.experts = static_cast<std::int32_t>(c.experts);
  args.rounded.gmem_unrounded_ids = data.unrounded.data();
  cuda::RouterDlogitsArguments& p = args.rounded.dlogits;
  p.gmem_dscores = dscores.data();
  p.gmem_ids = data.ids.data();
  p.gmem_token_offsets = data.offsets.data();
  p.gmem_scores = data.scores.data();
  p.gmem_logits = data.logits.data();
  p.gmem_aux_dlogits = c.aux ? data.aux.data() : nullptr;
  p.aux_pitch = c.experts;
  p.gmem_dlogits = dlogits[0].value;
  p.dlogits_are_scratch = !c.all_outputs;
  p.gmem_rounded = rounded.data();
  p.gmem_copy = copy.data();
  p.copy_pitch = c.experts;
  p.tokens = c.tokens;
  p.experts = static_cast<std::int32_t>(c.experts);
  p.top_k = static_cast<std::int32_t>(c.top_k);
  p.kind = c.kind;
  p.route_scale = kRouteScale;
  p.normalize_scores = c.normalize;
  p.gmem_token_mask = data.mask.data();
  Listed listed(c, data.ids.size());
  if (c.rows) listed.give_to(args);
  ASSERT_EQ(
      cuda::launch_router_dlogits_rounded_config<cuda::RouterDlogitsRoundedConfig>(args, nullptr),
      cudaSuccess);
  ASSERT_EQ(emulator::run(schedule), "");
  EXPECT_EQ(dscores, data.dscores);  // sums of a row's partials in order: bits
  double largest = 0;
  auto const* const bits = reinterpret_cast<std::uint16_t const*>(rounded.data());
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(cpu[i])));
    ASSERT_NEAR(copy[i], cpu[i], 2e-6) << i;
    if (c.all_outputs) {
      ASSERT_EQ(dlogits[i / 4].value[i % 4], copy[i]) << i;
    } else {
      ASSERT_TRUE(std::isnan(dlogits[i / 4].value[i % 4])) << i;
    }
    std::uint32_t const wide = std::uint32_t{bits[i]} << 16;
    ASSERT_NEAR(__uint_as_float(wide), copy[i], std::abs(copy[i]) / 256) << i;
  }
  if (data.offsets.back() > 0) EXPECT_GT(largest, 0.1);
  EXPECT_TRUE(std::ranges::equal(copy, by_plain_twin(c, args), {}, bits_of, bits_of));
  if (c.rows) listed.expect_right(c, data, copy);
}

TEST(RoundedDlogitsAsOnCpu, EveryKindOfToken) {
  std::size_t number = 0;
  for (RoundedCase const& c : rounded_cases()) {
    expect_near_cpu(c, emulator::kSchedules[number++ % 4]);
  }
}

}  // namespace
}  // namespace tessera::routing_test
