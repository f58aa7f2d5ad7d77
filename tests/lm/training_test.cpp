// SPDX-License-Identifier: Apache-2.0
// Training: it learns, and a run that was stopped goes on as if it had not been, bit for bit.
#include "lm/trainer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "lm/checkpoint.hpp"
#include "lm/evaluation.hpp"
#include "lm/safetensors.hpp"
#include "tests/lm/training.hpp"

namespace tessera::lm {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::string> contents(fs::path const& folder) {
  std::map<std::string, std::string> files;
  for (auto const& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_text(entry.path());
  }
  return files;
}

void expect_equal_files(fs::path const& a, fs::path const& b) {
  auto const first = contents(a), second = contents(b);
  EXPECT_EQ(first.size(), 5u);
  ASSERT_EQ(first.size(), second.size());
  for (auto const& [name, bytes] : first) {
    EXPECT_TRUE(second.contains(name) && second.at(name) == bytes) << name << " differs";
  }
}

TEST(Training, ResumedAfterAStopIsBitForBitTheStraightRun) {
  TemporaryFolder const straight, stopped;
  Corpus const corpus = small_corpus();
  TrainingState state = initial_state(small_options(20), source_of(corpus));
  EXPECT_EQ(train(state, corpus, straight.path(), 2), RunEnd::finished);

  TrainingState first = initial_state(small_options(20), source_of(corpus));
  EXPECT_EQ(train(first, corpus, stopped.path(), 1, 10), RunEnd::stopped);
  TrainingState second = load_state(stopped.path());
  EXPECT_EQ(second.step, 10);
  EXPECT_EQ(train(second, corpus, stopped.path(), 3), RunEnd::finished);
  expect_equal_files(straight.path(), stopped.path());
}

TEST(Training, ExtendedByMoreStepsIsBitForBitTheLongRun) {
  TemporaryFolder const straight, extended;
  Corpus const corpus = small_corpus();
  TrainingState state = initial_state(small_options(20), source_of(corpus));
  train(state, corpus, straight.path(), 2);

  TrainingState first = initial_state(small_options(10), source_of(corpus));
  EXPECT_EQ(train(first, corpus, extended.path(), 2), RunEnd::finished);
  TrainingState second = load_state(extended.path());
  second.options.steps = 20;
  train(second, corpus, extended.path(), 2);
  expect_equal_files(straight.path(), extended.path());
}

TEST(Training, DependsOnTheSeed) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  TrainingOptions options = small_options(2);
  TrainingState first = initial_state(options, source_of(corpus));
  options.seed = 2;
  TrainingState second = initial_state(options, source_of(corpus));
  train(first, corpus, folder.path(), 1);
  train(second, corpus, folder.path(), 1);
  EXPECT_NE(first.parameters, second.parameters);
}

TEST(Training, LearnsWhatItIsShown) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  TrainingOptions options = small_options(150);
  options.rate = 1e-2;
  TrainingState state = initial_state(options, source_of(corpus));
  train(state, corpus, folder.path(), 2);
  // The text's entropy: a letter repeats with probability 1/4 + 3/4 * 1/26, else uniform: 4.37 bits.
  EXPECT_LT(state.history.held_out.back(), 4.9f);
  EXPECT_GT(state.history.held_out.back(), 4.3f);
  EXPECT_EQ(state.history.loss.size(), 150u);
  EXPECT_EQ(state.history.held_out.size(), 30u);
  EXPECT_EQ(state.history.expert_load.size(), 15u * 2 * 5);
}

TEST(Training, BalanceLossEvensTheExperts) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  double balance[2];
  for (int const on : {0, 1}) {
    TrainingOptions options = small_options(60);
    options.balance = on;
    TrainingState state = initial_state(options, source_of(corpus));
    train(state, corpus, folder.path(), 2);
    auto const& history = state.history.balance;
    balance[on] = std::accumulate(history.end() - 20, history.end(), 0.0) / 20;
  }
  EXPECT_LT(balance[1] - 1, 0.7 * (balance[0] - 1)) << balance[0] << " without";
}

TEST(Training, SelectionBiasEvensTheExperts) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  double balance[2];
  for (int const on : {0, 1}) {
    TrainingOptions options = small_options(60);
    options.model.router.kind = RouterKind::sigmoid_bias;
    options.balance = 0;
    options.bias_rate = on * 1e-2;
    TrainingState state = initial_state(options, source_of(corpus));
    train(state, corpus, folder.path(), 2);
    auto const& history = state.history.balance;
    balance[on] = std::accumulate(history.end() - 20, history.end(), 0.0) / 20;
    // Whole steps of the rate; the optimizer and its decay stay away.
    ParameterLayout const layout(options.model);
    float largest = 0;
    for (std::int64_t e = 0; e < options.model.experts; ++e) {
      auto const at = static_cast<std::size_t>(layout.layer(1).selection_bias + e);
      float const bias = state.parameters[at];
      largest = std::max(largest, std::abs(bias));
      EXPECT_NEAR(std::remainder(bias, 1e-2f), 0, 1e-5f);
      EXPECT_EQ(state.moments.first[at], 0);
    }
    EXPECT_EQ(largest > 0, on == 1);
  }
  EXPECT_LT(balance[1] - 1, 0.7 * (balance[0] - 1)) << balance[0] << " without";
  EXPECT_EQ(SafetensorsFile(folder.path() / kModelFile)
                .read_vector("model.layers.1.mlp.gate.e_score_correction_bias")
                .size(),
            5u);
}

TEST(Training, StopsAtALossThatIsNotFinite) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  TrainingState state = initial_state(small_options(5), source_of(corpus));
  state.parameters[0] = std::nanf("");
  state.parameters['a' * 32] = std::nanf("");
  EXPECT_THROW(train(state, corpus, folder.path(), 1), EnvironmentError);
  EXPECT_TRUE(fs::is_empty(folder.path()));  // nothing is saved over a good run
}

TEST(Training, RefusesWhatTheMachineCannotHold) {
  TrainingOptions options = small_options(5);
  EXPECT_NO_THROW(require_memory(options));
  options.batch = 65'536;
  options.model.context = 60'000;
  EXPECT_THROW(require_memory(options), InputError);
}

TEST(Balance, IsTheLargestOverTheMeanLoad) {
  std::vector<std::int32_t> const counts = {4, 4, 4, 4, 16, 0, 0, 0};
  EXPECT_DOUBLE_EQ(expert_load(counts, 2).max_over_mean, (1.0 + 4.0) / 2);
  EXPECT_DOUBLE_EQ(expert_load(counts, 2).coefficient_of_variation, std::sqrt(3.0) / 2);
  EXPECT_EQ(expert_load(counts, 2).idle, 3);
  std::vector<std::int32_t> const none = {0, 0};
  EXPECT_DOUBLE_EQ(expert_load(none, 1).max_over_mean, 0);
}

TEST(LearningRate, WarmsUpAndFallsToATenth) {
  EXPECT_DOUBLE_EQ(learning_rate(1, 10, 110, 1), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(1, 10, 110, 10), 1);
  EXPECT_DOUBLE_EQ(learning_rate(1, 10, 110, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(1, 10, 110, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(1, 10, 110, 1000), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(1, 0, 0, 1), 0.1);
}

TEST(AdamW, TakesTheDocumentedStep) {
  ModelConfig const config = small_config();
  ParameterLayout const layout(config);
  Context const context = cpu_context(2);
  auto const size = static_cast<std::size_t>(layout.size());
  std::vector<float> parameters(size, 2.0f), gradients(size, 0.0f);
  Moments moments{std::vector<float>(size, 0.0f), std::vector<float>(size, 0.0f)};
  gradients[0] = 3;  // norm 3 is clipped to 1
  double const norm = adamw_step(context, {}, layout, 1, 0.1, gradients, parameters, moments);
  EXPECT_DOUBLE_EQ(norm, 3);
  EXPECT_NEAR(moments.first[0], 0.1, 1e-6);
  EXPECT_NEAR(moments.second[0], 0.01, 1e-6);
  EXPECT_NEAR(parameters[0], 2 - 0.1 * (1 + 0.1 * 2), 1e-5);  // m/c1 = v/c2 = 1
  EXPECT_NEAR(parameters[1], 2 - 0.1 * (0.1 * 2), 1e-6);      // decay alone
  auto const norm_weight = static_cast<std::size_t>(layout.final_norm());
  EXPECT_EQ(parameters[norm_weight], 2.0f);  // norms do not decay
}

TEST(AdamW, FollowsItsDefinitionOverSteps) {
  ParameterLayout const layout(small_config());
  Context const context = cpu_context(2);
  auto const size = static_cast<std::size_t>(layout.size());
  std::vector<float> parameters(size, 0.5f), gradients(size, 0.0f);
  Moments moments{std::vector<float>(size, 0.0f), std::vector<float>(size, 0.0f)};
  AdamW const options;
  constexpr double kRate = 0.01;
  double m[2] = {}, v[2] = {}, w[2] = {0.5, 0.5};
  for (int step = 1; step <= 4; ++step) {
    double const g[2] = {0.3 / step, -0.4 / step};  // a norm of at most 0.5 is not clipped
    for (std::size_t i = 0; i < 2; ++i) {
      gradients[i] = static_cast<float>(g[i]);
      m[i] = options.beta1 * m[i] + (1 - options.beta1) * g[i];
      v[i] = options.beta2 * v[i] + (1 - options.beta2) * g[i] * g[i];
      double const first = m[i] / (1 - std::pow(options.beta1, step));
      double const second = v[i] / (1 - std::pow(options.beta2, step));
      w[i] -= kRate * (first / (std::sqrt(second) + options.epsilon) + options.decay * w[i]);
    }
    EXPECT_NEAR(adamw_step(context, options, layout, step, kRate, gradients, parameters, moments),
                0.5 / step, 1e-6);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(moments.first[i], m[i], 1e-7) << step;
      EXPECT_NEAR(moments.second[i], v[i], 1e-8) << step;
      EXPECT_NEAR(parameters[i], w[i], 1e-6) << step;
    }
  }
}

}  // namespace
}  // namespace tessera::lm
