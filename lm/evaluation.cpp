// SPDX-License-Identifier: Apache-2.0
#include "lm/evaluation.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "lm/corpus.hpp"

namespace tessera::lm {

namespace {

constexpr std::size_t kBytes = ModelConfig::kVocabulary;

// Holds which windows of a text are used: all, or as many as wanted, spread evenly.
struct Choice {
  std::int64_t all, used, context;
  Choice(std::size_t bytes, std::int64_t context_, std::int64_t max_windows)
      : all(count_windows(bytes, context_)),
        used(max_windows > 0 ? std::min(all, max_windows) : all),
        context(context_) {}
  [[nodiscard]] std::int64_t start(std::int64_t i) const { return i * all / used * context; }
};

}  // namespace

// Windows are `context` apart: the last target of one is the first input of the next.
std::int64_t count_windows(std::size_t bytes, std::int64_t context) {
  return (static_cast<std::int64_t>(bytes) - 1) / context;
}

std::optional<double> model_bits_per_byte(Model& model, std::span<float const> parameters,
                                          HeldOut const& held_out, bool moe) {
  std::int64_t const context = model.config().context;
  Choice const choice(held_out.text.size(), context, held_out.max_windows);
  std::int64_t const batch = std::clamp<std::int64_t>(held_out.batch, 1, HeldOut::kLargestBatch);
  Windows windows(batch, context);
  double nats = 0;
  for (std::int64_t first = 0; first < choice.used; first += batch) {
    if (held_out.stop != nullptr && held_out.stop->load()) return std::nullopt;
    std::int64_t const count = std::min(batch, choice.used - first);
    for (std::int64_t i = 0; i < count; ++i) {
      windows.set(i, held_out.text, choice.start(first + i));
    }
    nats += model.evaluate(parameters, windows.batch(count), moe) * static_cast<double>(count);
    if (held_out.report) held_out.report(first + count, choice.used);
  }
  return nats / static_cast<double>(choice.used) / std::numbers::ln2;
}

double bigram_bits_per_byte(std::span<std::uint8_t const> train,
                            std::span<std::uint8_t const> held_out, std::int64_t context,
                            std::int64_t max_windows) {
  std::vector<double> pairs(kBytes * kBytes, 0.0), firsts(kBytes, 0.0);
  for (std::size_t i = 0; i + 1 < train.size(); ++i) {
    pairs[train[i] * kBytes + train[i + 1]] += 1;
    firsts[train[i]] += 1;
  }
  Choice const choice(held_out.size(), context, max_windows);
  double bits = 0;
  for (std::int64_t window = 0; window < choice.used; ++window) {
    auto const start = static_cast<std::size_t>(choice.start(window));
    for (std::size_t i = start; i < start + static_cast<std::size_t>(context); ++i) {
      double const count = pairs[held_out[i] * kBytes + held_out[i + 1]];
      bits -= std::log2((count + 0.5) / (firsts[held_out[i]] + 0.5 * static_cast<double>(kBytes)));
    }
  }
  return bits / static_cast<double>(choice.used * context);
}

}  // namespace tessera::lm
