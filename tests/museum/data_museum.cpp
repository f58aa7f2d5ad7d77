// SPDX-License-Identifier: Apache-2.0
// Bugs that other libraries shipped, as cases of the verification harness: it poisons outputs and workspace with
// NaN, puts canaries around every buffer, compares row by row with fp64, and repeats bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/names.hpp"
#include "verify/runner.hpp"

namespace tessera::verify {
namespace {

Context make_context(std::int32_t threads) {
  return std::move(Context::create({.device = {}, .num_threads = threads})).value();
}

CaseResult run(LayerCase const& layer_case) {
  Context const one = make_context(1), three = make_context(3);
  auto result = verify_case(three, one, layer_case);
  EXPECT_TRUE(result.ok()) << result.status().text();
  CaseResult out = result.ok() ? std::move(result).value() : CaseResult{};
  std::string failures;
  for (auto const& failure : out.failures) failures += failure + '\n';
  EXPECT_TRUE(out.ok) << failures << "tessera verify " << case_options(layer_case);
  return out;
}

LayerCase layer_of(std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = tokens, .hidden = 20, .intermediate = 12, .experts = experts, .top_k = top_k};
  layer_case.desc.bias = true;
  layer_case.seed = 3;
  return layer_case;
}

// Tokens whose first choice is listed; further choices follow it among the experts in use.
LayerCase layer_with_ids(std::int64_t experts, std::int64_t top_k, std::vector<std::int64_t> ids) {
  LayerCase layer_case = layer_of(static_cast<std::int64_t>(ids.size()) / top_k, experts, top_k);
  layer_case.routing.pattern = RoutingPattern::file;
  layer_case.routing.topk_weights.assign(ids.size(), 0.75f);
  layer_case.routing.topk_ids = std::move(ids);
  return layer_case;
}

// sonic-moe #63, QuACK #133: tiles of garbage passed tests with atol = 1.4e-2, because the values compared
// were about 1e-5. Here a wrong row fails although it is as near as that, and so do zeros.
TEST(DataMuseum, CorruptTilesBelowAnAbsoluteTolerance) {
  constexpr double kTheirTolerance = 1.4e-2;
  constexpr std::int64_t kRows = 32, kColumns = 64;
  std::vector<double> ref;
  std::vector<float> naive;
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    ref.push_back(1e-5 * (1 + static_cast<double>(i % 7)));
    naive.push_back(static_cast<float>(ref.back()));
  }
  Grouping rows;
  for (std::int64_t row = 1; row <= kRows; ++row) rows.group_ends.push_back(row * kColumns);
  double const unit = 1.0 / 256;  // even with bf16's allowance
  auto const accepted = [&](std::vector<float> const& out) {
    double worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(out[i]) - ref[i]));
    }
    EXPECT_LT(worst, kTheirTolerance);  // what they saw
    return compare(ref, {&naive}, out, rows, unit).ok;
  };
  EXPECT_TRUE(accepted(naive));
  std::vector<float> corrupt = naive;
  std::copy_n(naive.begin(), 16, corrupt.begin() + 5 * kColumns + 3);  // a piece of another row
  EXPECT_FALSE(accepted(corrupt));
  EXPECT_FALSE(accepted(std::vector<float>(naive.size(), 0.0f)));
}

// pytorch #172439 and #193633, TransformerEngine #3484: an expert without tokens had NaN, or the last step's
// numbers, as weight gradient. The harness fills gradients with NaN and wants exact zeros.
TEST(DataMuseum, EmptyExpertsHaveZeroGradients) {
  for (double const fraction : {0.0, 0.25, 0.5, 0.875}) {
    LayerCase layer_case = layer_of(40, 8, 1);
    layer_case.routing = {.pattern = RoutingPattern::empty, .parameter = fraction};
    run(layer_case);
    layer_case.gradient_mode = GradientMode::accumulate;  // and here: left as they are
    run(layer_case);
  }
  LayerCase none = layer_of(40, 8, 2);
  none.sentinel_fraction = 1;  // all experts empty
  CaseResult const result = run(none);
  EXPECT_EQ(result.routed_rows, 0);
  auto const& gradient = result.outputs.at("dw_up");
  EXPECT_TRUE(std::all_of(gradient.begin(), gradient.end(), [](float v) { return v == 0; }));
}

// Liger #1463, Primus-Turbo #425: a group without rows at a place where the kernel did not look for one: it hung
// or faulted. (The test runner's time limit stands for the hang.)
TEST(DataMuseum, EmptyExpertsAnywhere) {
  for (std::vector<std::int64_t> const& busy :
       {std::vector<std::int64_t>{0}, {6}, {3}, {0, 6}, {0, 1, 2}, {4, 5, 6}, {2, 4}}) {
    std::vector<std::int64_t> ids;
    for (std::size_t token = 0; token < 23; ++token) ids.push_back(busy[token % busy.size()]);
    run(layer_with_ids(7, 1, ids));
  }
}

// Liger #1361, #1368, #1398: wrong rows in a tile that is not full; one token; no tokens. Row blocks of the CPU
// have 320 rows, those of GPU kernels 64 or 128.
TEST(DataMuseum, PartialTilesOneTokenNoRows) {
  for (std::int64_t const rows : {0, 1, 63, 64, 65, 127, 129, 319, 320, 321}) {
    LayerCase layer_case = layer_of(rows, 3, 1);
    layer_case.routing.pattern = RoutingPattern::one_expert;
    EXPECT_EQ(run(layer_case).routed_rows, rows);
  }
}

// transformers #45621, aiter #2644: the id of a padded slot was used as an index. Ids outside [0, E) of every
// kind, and tokens that have no other; canaries stand around every buffer.
TEST(DataMuseum, TokensOfSentinelsOnly) {
  constexpr std::int64_t kExperts = 5;
  std::vector<std::int64_t> const outside = {kExperts, -1, kExperts + 1,
                                             std::numeric_limits<std::int32_t>::max(),
                                             std::numeric_limits<std::int32_t>::min()};
  std::vector<std::int64_t> ids;
  for (std::size_t token = 0; token < 30; ++token) {
    bool const valid = token % 3 == 0;
    ids.push_back(valid ? static_cast<std::int64_t>(token) % kExperts
                        : outside[token % outside.size()]);
    ids.push_back(outside[(token + 1) % outside.size()]);
  }
  LayerCase layer_case = layer_with_ids(kExperts, 2, ids);
  EXPECT_EQ(run(layer_case).routed_rows, 10);
  layer_case.desc.ids_dtype = DType::int64;
  for (std::int64_t& id : layer_case.routing.topk_ids) {
    if (id > kExperts) id = std::int64_t{1} << 40;  // its low 32 bits are expert 0
  }
  EXPECT_EQ(run(layer_case).routed_rows, 10);
}

}  // namespace
}  // namespace tessera::verify
