// SPDX-License-Identifier: Apache-2.0
#include "lm/sampler.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

// p('a') = 1/2, p('b') = 1/4, p('c') = 1/4 at temperature 1; everything else is next to impossible.
std::vector<float> known_logits() {
  std::vector<float> logits(256, -100.0f);
  logits['a'] = std::log(2.0f);
  logits['b'] = logits['c'] = 0;
  return logits;
}

TEST(Sampler, FollowsTheDistribution) {
  SamplingOptions const options{.temperature = 1, .top_p = 1};
  auto const logits = known_logits();
  EXPECT_EQ(choose_byte(logits, options, 0.0), 'a');
  EXPECT_EQ(choose_byte(logits, options, 0.49), 'a');
  EXPECT_EQ(choose_byte(logits, options, 0.51), 'b');
  EXPECT_EQ(choose_byte(logits, options, 0.74), 'b');
  EXPECT_EQ(choose_byte(logits, options, 0.76), 'c');
}

TEST(Sampler, TemperatureSharpens) {
  // At 1/2 the odds are squared: 2/3, 1/6, 1/6; at 0 there is no choice.
  auto const logits = known_logits();
  EXPECT_EQ(choose_byte(logits, {.temperature = 0.5, .top_p = 1}, 0.66), 'a');
  EXPECT_EQ(choose_byte(logits, {.temperature = 0.5, .top_p = 1}, 0.67), 'b');
  EXPECT_EQ(choose_byte(logits, {.temperature = 0}, 0.999), 'a');
}

TEST(Sampler, TopKAndTopPCutTheTail) {
  auto const logits = known_logits();
  EXPECT_EQ(choose_byte(logits, {.temperature = 1, .top_p = 1, .top_k = 2}, 0.999), 'b');
  EXPECT_EQ(choose_byte(logits, {.temperature = 1, .top_p = 0.5}, 0.999), 'a');
  EXPECT_EQ(choose_byte(logits, {.temperature = 1, .top_p = 0.6}, 0.999), 'b');
}

TEST(Sampler, RefusesLogitsThatAreNotFinite) {
  for (float const bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    for (double const temperature : {0.0, 1.0}) {
      auto logits = known_logits();
      logits['z'] = bad;
      EXPECT_THROW(choose_byte(logits, {.temperature = temperature}, 0.5), InputError) << bad;
    }
  }
}

TEST(Sampler, RefusesOptionsOutOfRange) {
  for (SamplingOptions const& bad :
       {SamplingOptions{.tokens = -1}, SamplingOptions{.temperature = -1},
        SamplingOptions{.temperature = std::nan("")}, SamplingOptions{.top_p = 0},
        SamplingOptions{.top_p = 1.5}, SamplingOptions{.top_k = 257}}) {
    EXPECT_THROW(validate(bad), InputError);
  }
  EXPECT_NO_THROW(validate(SamplingOptions{}));
}

TEST(Sampler, GenerationSlidesPastTheContextAndFollowsTheSeed) {
  ModelConfig const config = small_config();
  std::string texts[2];
  for (int const threads : {1, 2}) {
    Context const context = cpu_context(threads);
    Model model(context, config);
    auto const parameters = initial_parameters(model.layout(), 1);
    texts[threads - 1] = generate(model, parameters, "ab", {.tokens = 60, .temperature = 1});
    EXPECT_EQ(texts[threads - 1].size(), 60u);
    EXPECT_NE(texts[threads - 1],
              generate(model, parameters, "ab", {.tokens = 60, .temperature = 1, .seed = 2}));
  }
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace tessera::lm
