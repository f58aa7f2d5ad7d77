// SPDX-License-Identifier: Apache-2.0
// The end of `tessera train`: what it prints of its run, for people and as JSON.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "cli/output.hpp"
#include "lm/corpus.hpp"
#include "lm/run_folder.hpp"
#include "lm/trainer.hpp"

namespace tessera::cli {

/// The run's state and text: a fresh one, or the one in --resume.
struct TrainRun {
  std::filesystem::path folder;
  lm::TrainingState state;
  lm::Corpus corpus;
  lm::FolderLock lock;  ///< of the folder
};

/// Holds what is known of a run when it ends.
struct TrainSummary {
  lm::RunEnd end = lm::RunEnd::finished;
  double tokens_per_second = 0;
  double bigram = 0;
  std::int64_t windows = 0;                     ///< of held-out text that were evaluated
  bool lacks_time = false;                      ///< for more of them
  std::optional<double> held_out, without_moe;  ///< of these windows; only when not stopped
  lm::ExpertLoad load;                          ///< of the last step of this run
  std::string plot_problem;
};

void print_train_summary(TrainRun const& run, TrainSummary const& summary);
Json train_summary_json(TrainRun const& run, TrainSummary const& summary);

}  // namespace tessera::cli
