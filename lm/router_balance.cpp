// SPDX-License-Identifier: Apache-2.0
#include "lm/router_balance.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kRowBlock = 128;

TESSERA_LM_SIMD void softmax(std::int64_t experts, float* row) {
  float const largest = *std::max_element(row, row + experts);
  for (std::int64_t e = 0; e < experts; ++e) row[e] = exp_of_negative(row[e] - largest);
  float const inverse = 1 / lane_sum(experts, [&](std::int64_t e) { return row[e]; });
  for (std::int64_t e = 0; e < experts; ++e) row[e] *= inverse;
}

// alpha * E * f_e / (T S)
std::vector<float> costs(double alpha, std::int64_t tokens, std::span<std::int32_t const> counts) {
  auto const rows = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  double const scale =
      alpha * static_cast<double>(counts.size()) /
      (static_cast<double>(tokens) * static_cast<double>(std::max<std::int64_t>(1, rows)));
  std::vector<float> costs;
  for (std::int32_t const count : counts) costs.push_back(static_cast<float>(scale * count));
  return costs;
}

}  // namespace

double balance_loss(double alpha, std::int64_t experts, std::span<float const> logits,
                    std::span<std::int32_t const> counts) {
  std::int64_t const tokens = static_cast<std::int64_t>(logits.size()) / experts;
  std::vector<float> const cost = costs(alpha, tokens, counts);
  double loss = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto const from = logits.begin() + t * experts;
    std::vector<float> p(from, from + experts);
    softmax(experts, p.data());
    for (std::size_t e = 0; e < p.size(); ++e) {
      loss += static_cast<double>(cost[e]) * static_cast<double>(p[e]);
    }
  }
  return loss;
}

void balance_loss_bwd(Context const& context, double alpha, std::int64_t experts,
                      std::span<float> logits, std::span<std::int32_t const> counts) {
  std::int64_t const tokens = static_cast<std::int64_t>(logits.size()) / experts;
  std::vector<float> const cost = costs(alpha, tokens, counts);
  context.parallel_for((tokens + kRowBlock - 1) / kRowBlock, [&](std::int64_t block) {
    std::int64_t const end = std::min(tokens, (block + 1) * kRowBlock);
    for (std::int64_t t = block * kRowBlock; t < end; ++t) {
      float* const p = logits.data() + t * experts;
      softmax(experts, p);
      float const mean = lane_sum(
          experts, [&](std::int64_t e) { return cost[static_cast<std::size_t>(e)] * p[e]; });
      for (std::int64_t e = 0; e < experts; ++e) p[e] *= cost[static_cast<std::size_t>(e)] - mean;
    }
  });
}

}  // namespace tessera::lm
