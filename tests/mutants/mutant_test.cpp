// SPDX-License-Identifier: Apache-2.0
// The tolerance accepts the correct layer and rejects every mutant, in the tensors where it must show.
#include "tests/mutants/mutant.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "verify/names.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {
namespace {

struct MutantCase {
  char const* name;
  Mutant mutant;
  std::vector<std::string> shows_in;  ///< each of these must fail
};

std::vector<MutantCase> const kMutants = {
    {"1 all zeros",
     Mutant::all_zeros,
     {"o", "dx", "dscores", "dw_up", "dw_down", "db_up", "db_down"}},
    {"2 neighbour row", Mutant::neighbour_row, {"o"}},
    {"3 swapped experts", Mutant::swapped_experts, {"o", "dx", "dscores", "dw_up", "dw_down"}},
    {"4 lost tail of d", Mutant::lost_hidden_tail, {"o", "dx", "dscores", "dw_up"}},
    {"4 lost tail of n", Mutant::lost_intermediate_tail, {"o", "dx", "dscores"}},
    {"4 lost tail of rows", Mutant::lost_token_tail, {"dw_down"}},
    {"5 ignored scores",
     Mutant::ignored_scores,
     {"o", "dx", "dw_up", "dw_down", "db_up", "db_down"}},
    {"6 stale row", Mutant::stale_row, {"o"}},
    {"7 swapped gate and up", Mutant::swapped_gate_and_up, {"o", "dx", "dscores", "dw_up"}},
    {"8 missing slot", Mutant::missing_slot, {"o", "dx"}},
    {"9 scaled ds", Mutant::scaled_dscores, {"dscores"}},
    {"10 ds without bias", Mutant::no_bias_in_dscores, {"dscores"}},
    {"11 computed sentinel", Mutant::computed_sentinel, {"o", "dx", "dscores", "dw_up", "dw_down"}},
    {"12 unwritten empty expert", Mutant::unwritten_empty_expert, {"dw_down"}},
    {"13 ignored accumulate", Mutant::ignored_accumulate, {"dw_up", "dw_down", "db_up", "db_down"}},
    {"14 wrong token", Mutant::wrong_token, {"o", "dscores", "dw_up", "dw_down"}},
    {"15 16-bit sums", Mutant::low_precision_sums, {"o"}},
};

/// A layer on which all mutants matter: biases, sentinels, an empty expert, gradients that accumulate.
LayerCase mutant_case(DType dtype, std::uint64_t seed) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = 96, .hidden = 72, .intermediate = 40, .experts = 8, .top_k = 3};
  layer_case.desc.dtype = dtype;
  layer_case.desc.bias = true;
  layer_case.routing = {.pattern = RoutingPattern::empty, .parameter = 0.125};
  layer_case.sentinel_fraction = 0.1;
  layer_case.gradient_mode = GradientMode::accumulate;
  layer_case.seed = seed;
  return layer_case;
}

Comparisons judge_mutant(LayerData const& data, Mutant mutant) {
  auto const inputs = reference_inputs(data);
  auto const forward = reference::forward(inputs);
  auto const backward =
      reference::backward(inputs, forward, reference::Values(data.d_o.begin(), data.d_o.end()));
  static Context const context = std::move(Context::create()).value();
  return judge(data, inputs, forward, reference_tensors(data, forward, backward),
               naive_samples(context, data, inputs, forward.metadata),
               mutant_tensors(data, mutant));
}

class Mutants : public testing::TestWithParam<DType> {};

TEST_P(Mutants, TheCorrectLayerIsAccepted) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    auto const results = judge_mutant(make_data(mutant_case(GetParam(), seed)), Mutant::none);
    for (auto const& [name, result] : results)
      EXPECT_TRUE(result.ok) << name << ": " << result.reason;
  }
}

TEST_P(Mutants, EveryMutantIsRejected) {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    LayerData const data = make_data(mutant_case(GetParam(), seed));
    for (MutantCase const& mutant : kMutants) {
      // Sums rounded to bf16 are wrong in fp32; among bf16 layers they show from longer sums on (below).
      if (mutant.mutant == Mutant::low_precision_sums && GetParam() != DType::fp32) continue;
      auto const results = judge_mutant(data, mutant.mutant);
      for (std::string const& name : mutant.shows_in) {
        EXPECT_FALSE(results.at(name).ok) << mutant.name << " passes in " << name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Mutants, testing::Values(DType::fp32, DType::bf16),
                         [](auto const& info) { return name_of(kDTypeNames, info.param); });

TEST(LowPrecisionSums, ShowInBf16FromLongerSumsOn) {
  LayerCase layer_case = mutant_case(DType::bf16, 1);
  layer_case.desc.shape.tokens = 32;
  layer_case.desc.shape.intermediate = 1024;
  auto const results = judge_mutant(make_data(layer_case), Mutant::low_precision_sums);
  EXPECT_FALSE(results.at("o").ok);
}

}  // namespace
}  // namespace tessera::verify
