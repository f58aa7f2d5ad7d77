// SPDX-License-Identifier: Apache-2.0
// Everything that a training run is: what fixes its result, how far it is, and what it has seen. Two equal
// states have equal futures, bit for bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lm/adamw.hpp"
#include "lm/config.hpp"
#include "lm/moe_block.hpp"
#include "lm/parameters.hpp"

namespace tessera::lm {

struct TrainingOptions {
  ModelConfig model;
  Rounding rounding = Rounding::none;
  std::int32_t tile = 128;  ///< of token rounding
  std::int64_t steps = 2400;
  std::int64_t batch = 8;  ///< sequences per step
  std::int64_t warmup = 100;
  std::int64_t eval_every = 100;
  double rate = 2e-3;     ///< peak learning rate
  double balance = 0.01;  ///< factor of the routers' balance loss
  double z_loss = 0;      ///< factor of their z-loss
  double bias_rate =
      1e-3;  ///< by which each step moves selection biases, where the router has them
  std::uint64_t seed = 1;

  /// Steps that the cosine spans: `steps`, rounded up so that short runs of different length share one
  /// schedule and the longer continues the shorter bit for bit.
  [[nodiscard]] std::int64_t schedule_span() const {
    constexpr std::int64_t kUnit = 200;
    return (steps + kUnit - 1) / kUnit * kUnit;
  }
  bool operator==(TrainingOptions const&) const = default;
};

/// Throws InputError for values out of range.
void validate(TrainingOptions const& options);

/// Where the text came from, and what it was.
struct TextSource {
  std::vector<std::string> paths;
  std::uint64_t fingerprint = 0;
};

/// Holds what the curve shows.
struct History {
  static constexpr std::int64_t kLoadEvery = 10;  ///< steps between snapshots of the experts' load

  std::vector<float> loss;         ///< bits per byte of each step's batch
  std::vector<float> balance;      ///< of each step: largest over mean load, averaged over layers
  std::vector<float> held_out;     ///< bits per byte after every TrainingOptions::eval_every steps
  std::vector<float> expert_load;  ///< [snapshots, layers, E], 1 = balanced
};

struct TrainingState {
  TrainingOptions options;
  TextSource text;
  std::int64_t step = 0;  ///< steps done
  std::vector<float> parameters;
  Moments moments;
  History history;
};

/// A run before its first step.
TrainingState initial_state(TrainingOptions const& options, TextSource text);

}  // namespace tessera::lm
