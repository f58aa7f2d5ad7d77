// SPDX-License-Identifier: Apache-2.0
#include "lm/router_balance.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "lm/random.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

TEST(RouterBalance, IsAlphaWhereAllExpertsAreUsedAlike) {
  std::vector<float> const logits(12, 0.5f);
  std::vector<std::int32_t> const counts = {2, 2, 2, 2};
  EXPECT_NEAR(balance_loss(0.3, 4, logits, counts), 0.3, 1e-6);
}

TEST(RouterBalance, IsLargestWhereOneExpertGetsAll) {
  std::vector<float> const logits = {50, 0, 0, 0, 50, 0, 0, 0};
  std::vector<std::int32_t> const counts = {2, 0, 0, 0};
  EXPECT_NEAR(balance_loss(0.3, 4, logits, counts), 1.2, 1e-6);
}

TEST(RouterBalance, GradientAgreesWithFiniteDifferences) {
  constexpr std::int64_t kExperts = 5;
  std::vector<float> logits(35);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(random_normal(1, Stream::sampling, i));
  }
  std::vector<std::int32_t> const counts = {5, 0, 3, 4, 2};
  std::vector<float> gradient = logits;
  balance_loss_bwd(cpu_context(2), 7, kExperts, gradient, counts);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    constexpr float kStep = 1e-2f;
    std::vector<float> above = logits, below = logits;
    above[i] += kStep;
    below[i] -= kStep;
    double const measured =
        (balance_loss(7, kExperts, above, counts) - balance_loss(7, kExperts, below, counts)) /
        static_cast<double>(above[i] - below[i]);
    EXPECT_NEAR(measured, static_cast<double>(gradient[i]), 2e-4) << i;
  }
}

}  // namespace
}  // namespace tessera::lm
