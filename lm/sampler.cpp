// SPDX-License-Identifier: Apache-2.0
// The model reads the last `context` bytes anew for every byte: at this size that costs milliseconds, and the
// window can slide without approximations.
#include "lm/sampler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "lm/error.hpp"
#include "lm/random.hpp"

namespace tessera::lm {

void validate(SamplingOptions const& o) {
  if (o.tokens < 0 || o.tokens > 1'000'000'000) {
    throw InputError(fmt::format("tokens = {}: must be in [0, 10^9]", o.tokens));
  }
  if (!(o.temperature >= 0 && o.temperature <= 100)) {
    throw InputError(fmt::format("temperature = {}: must be in [0, 100]", o.temperature));
  }
  if (!(o.top_p > 0 && o.top_p <= 1)) {
    throw InputError(fmt::format("top-p = {}: must be in (0, 1]", o.top_p));
  }
  if (o.top_k < 0 || o.top_k > ModelConfig::kVocabulary) {
    throw InputError(
        fmt::format("top-k = {}: must be in [0, {}]", o.top_k, ModelConfig::kVocabulary));
  }
}

std::uint8_t choose_byte(std::span<float const> logits, SamplingOptions const& options,
                         double uniform) {
  if (!std::all_of(logits.begin(), logits.end(), [](float v) { return std::isfinite(v); })) {
    throw InputError(
        "the model's logits are not finite: its weights are too large; take an earlier checkpoint, "
        "or "
        "train with a lower --lr");
  }
  std::array<std::uint8_t, ModelConfig::kVocabulary> order;
  std::iota(order.begin(), order.end(), std::uint8_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint8_t a, std::uint8_t b) { return logits[a] > logits[b]; });
  if (options.temperature == 0) return order[0];

  std::size_t kept = options.top_k > 0 ? static_cast<std::size_t>(options.top_k) : order.size();
  std::array<double, ModelConfig::kVocabulary> weight;
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    weight[i] =
        std::exp((static_cast<double>(logits[order[i]]) - static_cast<double>(logits[order[0]])) /
                 options.temperature);
    total += weight[i];
  }
  double nucleus = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    nucleus += weight[i];
    if (nucleus >= options.top_p * total) kept = i + 1;
  }
  double remaining = uniform * nucleus;
  for (std::size_t i = 0; i < kept; ++i) {
    remaining -= weight[i];
    if (remaining < 0) return order[i];
  }
  return order[kept - 1];
}

std::string generate(Model& model, std::span<float const> parameters, std::string_view prompt,
                     SamplingOptions const& options, std::function<bool(char)> const& each) {
  std::vector<std::uint8_t> text(prompt.begin(), prompt.end());
  auto const context = static_cast<std::size_t>(model.config().context);
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    auto const window = std::span<std::uint8_t const>(text).last(std::min(context, text.size()));
    double const uniform =
        random_unit(options.seed, Stream::sampling, static_cast<std::uint64_t>(i));
    text.push_back(choose_byte(model.next_logits(parameters, window), options, uniform));
    if (each && !each(static_cast<char>(text.back()))) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace tessera::lm
