// SPDX-License-Identifier: Apache-2.0
#include "lm/cross_entropy.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lm/config.hpp"
#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kRowBlock = 64;
constexpr std::int64_t kWidth = ModelConfig::kVocabulary;

// Returns the row's loss; with `scale` the logits become scale * (softmax - one-hot).
TESSERA_LM_SIMD double row_loss(std::uint8_t target, float* logits, bool gradient, float scale) {
  float largest = logits[0];
  for (std::int64_t v = 1; v < kWidth; ++v) largest = logits[v] > largest ? logits[v] : largest;
  float const wanted = logits[target] - largest;
  float exponentials[kWidth];
  for (std::int64_t v = 0; v < kWidth; ++v) exponentials[v] = exp_of_negative(logits[v] - largest);
  float const sum = lane_sum(kWidth, [&](std::int64_t v) { return exponentials[v]; });
  if (gradient) {
    float const factor = scale / sum;
    for (std::int64_t v = 0; v < kWidth; ++v) logits[v] = factor * exponentials[v];
    logits[target] -= scale;
  }
  return std::log(static_cast<double>(sum)) - static_cast<double>(wanted);
}

}  // namespace

double cross_entropy(Context const& context, std::span<std::uint8_t const> targets, float* logits,
                     bool gradient) {
  auto const count = static_cast<std::int64_t>(targets.size());
  std::int64_t const blocks = (count + kRowBlock - 1) / kRowBlock;
  float const scale = 1 / static_cast<float>(count);
  std::vector<double> partials(static_cast<std::size_t>(blocks), 0.0);
  context.parallel_for(blocks, [&](std::int64_t block) {
    std::int64_t const end = std::min(count, (block + 1) * kRowBlock);
    for (std::int64_t t = block * kRowBlock; t < end; ++t) {
      partials[static_cast<std::size_t>(block)] +=
          row_loss(targets[static_cast<std::size_t>(t)], logits + t * kWidth, gradient, scale);
    }
  });
  double total = 0;
  for (double const partial : partials) total += partial;
  return total / static_cast<double>(count);
}

}  // namespace tessera::lm
