// SPDX-License-Identifier: Apache-2.0
// Bits per byte of held-out text, of the model and of a bigram, over the same predictions: every byte but
// the first of each window of context + 1 bytes, windows side by side.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "lm/model.hpp"

namespace tessera::lm {

struct HeldOut {
  static constexpr std::int64_t kLargestBatch = 16;

  std::span<std::uint8_t const> text;
  std::int64_t max_windows = 0;  ///< 0: all; else that many, spread evenly
  std::int64_t batch =
      kLargestBatch;  ///< windows at once, at most kLargestBatch: what the model keeps grows with it
  std::atomic<bool> const* stop = nullptr;  ///< ends the evaluation after the windows at hand
  std::function<void(std::int64_t done, std::int64_t windows)> report = {};
};

/// Windows of a held-out text.
std::int64_t count_windows(std::size_t bytes, std::int64_t context);

/// -mean log2 p(byte | the bytes before it in its window). Without `moe` the MoE blocks are skipped. Nothing where
/// it was stopped.
std::optional<double> model_bits_per_byte(Model& model, std::span<float const> parameters,
                                          HeldOut const& held_out, bool moe = true);

/// The same for p(b | a) = (count(a,b) + 1/2) / (count(a) + 128), counted over the training text. `max_windows` as in
/// HeldOut.
double bigram_bits_per_byte(std::span<std::uint8_t const> train,
                            std::span<std::uint8_t const> held_out, std::int64_t context,
                            std::int64_t max_windows = 0);

}  // namespace tessera::lm
