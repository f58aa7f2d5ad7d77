// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding, from the source that GPUs get, beside the CPU backend: members that were
// dropped, experts that were added, tokens with no slot or more than a warp has lanes, padding, slots of no token.
#include <gtest/gtest.h>

#include "cuda/kernels/router_dlogits_rounded.cuh"

#include <algorithm>
#include <cmath>
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
}

TEST(RoundedDlogitsAsOnCpu, EveryKindOfToken) {
  std::size_t number = 0;
  for (RoundedCase const& c : rounded_cases()) {
    expect_near_cpu(c, emulator::kSchedules[number++ % 4]);
  }
}

}  // namespace
}  // namespace tessera::routing_test
