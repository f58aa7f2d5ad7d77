// SPDX-License-Identifier: Apache-2.0
// The whole model's gradient against finite differences of its loss, and its independence of threads.
#include "lm/model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "lm/adamw.hpp"
#include "lm/corpus.hpp"
#include "lm/random.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

// Moves the parameters of one tensor by `distance` along a random direction of unit length.
std::vector<float> moved(std::vector<float> parameters, NamedSlice const& slice, double distance) {
  double norm = 0;
  for (std::int64_t i = 0; i < slice.size; ++i) {
    norm += std::pow(random_normal(7, Stream::sampling, static_cast<std::uint64_t>(i)), 2);
  }
  for (std::int64_t i = 0; i < slice.size; ++i) {
    double const direction =
        random_normal(7, Stream::sampling, static_cast<std::uint64_t>(i)) / std::sqrt(norm);
    parameters[static_cast<std::size_t>(slice.offset + i)] +=
        static_cast<float>(distance * direction);
  }
  return parameters;
}

double slope_along(std::vector<float> const& gradients, NamedSlice const& slice) {
  std::vector<float> const zero(gradients.size(), 0.0f);
  std::vector<float> const direction = moved(zero, slice, 1);
  double slope = 0;
  for (std::int64_t i = slice.offset; i < slice.offset + slice.size; ++i) {
    slope += static_cast<double>(gradients[static_cast<std::size_t>(i)]) *
             static_cast<double>(direction[static_cast<std::size_t>(i)]);
  }
  return slope;
}

class ModelGradient : public testing::TestWithParam<ModelConfig> {};

// Per tensor: the slope along a random direction, from the gradient and from a central difference. All
// parameters are drawn anew at unit scale, the norms too, so that no gradient vanishes.
TEST_P(ModelGradient, AgreesWithFiniteDifferences) {
  ModelConfig const config = GetParam();
  Context const context = cpu_context(2);
  Model model(context, config);
  std::vector<float> parameters = initial_parameters(model.layout(), 3);
  for (NamedSlice const& slice : model.layout().slices()) {
    for (std::int64_t i = slice.offset; i < slice.offset + slice.size; ++i) {
      double const normal = random_normal(5, Stream::sampling, static_cast<std::uint64_t>(i));
      if (slice.role == Role::norm)
        parameters[static_cast<std::size_t>(i)] += 0.3f * static_cast<float>(normal);
    }
  }
  std::vector<std::uint8_t> const text = random_text(512, 11);
  std::int64_t const sequences = 3, length = config.context - 2;
  Windows windows(sequences, length);
  draw_batch(text, 1, 0, sequences, length, windows);
  Batch const batch = windows.batch(sequences);
  std::vector<float> gradients(parameters.size(), std::nanf(""));
  double const loss = model.train(parameters, batch, {}, {}, gradients);
  EXPECT_NEAR(loss, model.evaluate(parameters, batch), 1e-6);

  constexpr double kStep = 2e-2;
  for (NamedSlice const& slice : model.layout().slices()) {
    double const above = model.evaluate(moved(parameters, slice, kStep), batch);
    double const below = model.evaluate(moved(parameters, slice, -kStep), batch);
    double const measured = (above - below) / (2 * kStep);
    double const slope = slope_along(gradients, slice);
    EXPECT_NEAR(measured, slope, 2e-3 * std::abs(slope) + 1e-4) << slice.name;
  }
}

// K = E, so that a step of the finite difference never changes which experts are chosen.
INSTANTIATE_TEST_SUITE_P(
    Shapes, ModelGradient,
    testing::Values(ModelConfig{.hidden = 24,
                                .intermediate = 10,
                                .layers = 2,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_dim = 6,
                                .context = 40,
                                .experts = 3,
                                .top_k = 3},
                    ModelConfig{.hidden = 17,
                                .intermediate = 5,
                                .layers = 1,
                                .heads = 3,
                                .kv_heads = 1,
                                .head_dim = 8,
                                .context = 9,
                                .experts = 2,
                                .top_k = 2,
                                .router = {.kind = RouterKind::softmax_topk_renorm}},
                    ModelConfig{.hidden = 16,
                                .intermediate = 6,
                                .layers = 2,
                                .heads = 2,
                                .kv_heads = 1,
                                .head_dim = 8,
                                .context = 12,
                                .experts = 2,
                                .top_k = 2,
                                .router = {.kind = RouterKind::sigmoid_bias}}));

TEST(Model, GivesEqualBitsForAnyNumberOfThreads) {
  ModelConfig const config = small_config();
  std::vector<std::uint8_t> const text = random_text(4096, 1);
  std::vector<float> expected;
  for (int const threads : {1, 2, 3, 7}) {
    Context const context = cpu_context(threads);
    Model model(context, config);
    std::vector<float> const parameters = initial_parameters(model.layout(), 1);
    Windows windows(5, config.context);
    draw_batch(text, 1, 0, 5, config.context, windows);
    std::vector<float> result(parameters.size());
    double const loss =
        model.train(parameters, windows.batch(5), {}, {.balance = 0.1, .z = 0.01}, result);
    result.push_back(static_cast<float>(loss));
    result.push_back(static_cast<float>(global_norm(context, result)));
    if (expected.empty()) expected = result;
    EXPECT_EQ(expected, result) << threads << " threads";
  }
}

// z adds the gradient of a mean of logsumexp(logits)^2: linear in z, and where logits are large it grows with them, so
// along the router's own weights.
TEST(Model, TakesTheRoutersZLoss) {
  ModelConfig const config = small_config();
  Context const context = cpu_context(2);
  Model model(context, config);
  std::vector<float> parameters = initial_parameters(model.layout(), 1);
  std::vector<NamedSlice> routers;
  for (NamedSlice const& slice : model.layout().slices()) {
    if (slice.name.ends_with("mlp.gate.weight")) routers.push_back(slice);
  }
  ASSERT_EQ(routers.size(), static_cast<std::size_t>(config.layers));
  for (NamedSlice const& router : routers) {
    for (std::int64_t i = 0; i < router.size; ++i) {
      parameters[static_cast<std::size_t>(router.offset + i)] *= 50;
    }
  }
  std::vector<std::uint8_t> const text = random_text(4096, 1);
  Windows windows(5, config.context);
  draw_batch(text, 1, 0, 5, config.context, windows);
  auto const gradients = [&](double z) {
    std::vector<float> result(parameters.size());
    model.train(parameters, windows.batch(5), {}, {.balance = 0, .z = z}, result);
    return result;
  };
  auto const none = gradients(0), one = gradients(1), two = gradients(2);
  for (NamedSlice const& router : routers) {
    double along = 0, twice = 0;
    for (std::int64_t i = 0; i < router.size; ++i) {
      auto const at = static_cast<std::size_t>(router.offset + i);
      along += (static_cast<double>(one[at]) - none[at]) * parameters[at];
      twice += (static_cast<double>(two[at]) - none[at]) * parameters[at];
    }
    EXPECT_GT(along, 1) << router.name;
    EXPECT_NEAR(twice, 2 * along, 1e-2 * along) << router.name;
  }
}

// Each byte is predicted from the bytes before it alone: one pass over a sequence has the loss of all its
// prefixes, each run by itself.
TEST(Model, IsCausal) {
  ModelConfig const config = small_config();
  Context const context = cpu_context(2);
  Model model(context, config);
  std::vector<float> const parameters = initial_parameters(model.layout(), 1);
  std::vector<std::uint8_t> const text = random_text(config.context + 1, 2);
  double nats = 0;
  for (std::size_t length = 1; length < text.size(); ++length) {
    auto const logits = model.next_logits(parameters, std::span(text).first(length));
    double sum = 0;
    for (float const logit : logits) sum += std::exp(static_cast<double>(logit));
    nats += std::log(sum) - static_cast<double>(logits[text[length]]);
  }
  Batch const batch{1, config.context, std::span(text).first(text.size() - 1),
                    std::span(text).last(text.size() - 1)};
  EXPECT_NEAR(model.evaluate(parameters, batch), nats / static_cast<double>(config.context), 1e-5);
}

TEST(Model, WithoutMoeSkipsExactlyTheMoeBlocks) {
  ModelConfig const config = small_config();
  Context const context = cpu_context(1);
  Model model(context, config);
  std::vector<float> parameters = initial_parameters(model.layout(), 1);
  std::vector<std::uint8_t> const text = random_text(1000, 4);
  Windows windows(2, config.context);
  draw_batch(text, 1, 0, 2, config.context, windows);
  double const skipped = model.evaluate(parameters, windows.batch(2), false);
  EXPECT_NE(skipped, model.evaluate(parameters, windows.batch(2)));
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    LayerOffsets const& at = model.layout().layer(layer);
    for (std::int64_t i = 0; i < config.experts * config.hidden * config.intermediate; ++i) {
      parameters[static_cast<std::size_t>(at.w_down + i)] = 0;
    }
  }
  EXPECT_EQ(skipped, model.evaluate(parameters, windows.batch(2)));
}

}  // namespace
}  // namespace tessera::lm
