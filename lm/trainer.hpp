// SPDX-License-Identifier: Apache-2.0
// The training loop: batch, gradient, update; now and then held-out text and a save.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "lm/corpus.hpp"
#include "lm/model.hpp"
#include "lm/training_state.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

/// Says how evenly a step's rows spread over the experts.
struct ExpertLoad {
  double max_over_mean = 0;             ///< averaged over layers
  double coefficient_of_variation = 0;  ///< the same
  std::int64_t idle = 0;                ///< experts without rows, of all layers
};

/// The load that counts [layers * E] say.
ExpertLoad expert_load(std::span<std::int32_t const> counts, std::int64_t layers);

/// Throws InputError if the machine's memory cannot hold the parameters and activations.
void require_memory(TrainingOptions const& options);

/// Held-out windows per evaluation along the way; the run ends with all of them, or as many as its time allows.
inline constexpr std::int64_t kEvaluationWindows = 128;

/// Says where a run stands after a step.
struct Progress {
  std::int64_t step = 0, steps = 0;
  double loss = 0;  ///< bits per byte of the step's batch
  double tokens_per_second = 0;
  ExpertLoad load;
  double seconds_left = 0;  ///< estimate
  bool evaluated = false;   ///< held_out is of this step
  double held_out = 0;      ///< bits per byte, the last known; 0 before the first
};

/// Holds what does not change the result of a run.
struct RunOptions {
  std::int64_t save_every = 400;
  double seconds = 0;                       ///< stops after that time; 0: never
  std::atomic<bool> const* stop = nullptr;  ///< stops after the step at hand
  std::function<void()> save;               ///< called every save_every steps and at the end
  std::function<void(Progress const&)> report;
};

enum class RunEnd { finished, out_of_time, stopped };

class Trainer {
 public:
  /// Holds context, state and corpus by reference. Ask require_memory() first.
  Trainer(Context const& context, TrainingState& state, Corpus const& corpus);

  /// Runs until state.options.steps are done, or the options end it. Saves at the end in any case.
  /// Throws EnvironmentError if the loss is no longer finite; the state last saved is then untouched.
  RunEnd run(RunOptions const& options);

  [[nodiscard]] Model& model() noexcept { return model_; }
  /// The load of the last step of this run.
  [[nodiscard]] ExpertLoad const& load() const noexcept { return load_; }
  /// Bytes trained per second of this run, evaluations and saves not counted.
  [[nodiscard]] double tokens_per_second() const noexcept;

 private:
  void step();
  double evaluate();
  [[nodiscard]] std::vector<float> load_snapshot() const;
  [[nodiscard]] Progress progress(bool evaluated) const;

  Context const& context_;
  TrainingState& state_;
  Corpus const& corpus_;
  Model model_;
  Windows windows_;
  std::vector<float> gradients_;
  ExpertLoad load_;
  double training_seconds_ = 0;
  std::int64_t steps_here_ = 0;
};

}  // namespace tessera::lm
