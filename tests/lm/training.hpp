// SPDX-License-Identifier: Apache-2.0
// A small run for the tests of training.
#pragma once

#include <atomic>
#include <filesystem>

#include "lm/run_folder.hpp"
#include "lm/trainer.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {

inline Corpus small_corpus() {
  Corpus corpus;
  corpus.train = random_text(6000, 1);
  corpus.held_out = random_text(600, 2);
  return corpus;
}

inline TrainingOptions small_options(std::int64_t steps) {
  return {.model = small_config(), .steps = steps, .batch = 4, .warmup = 3, .eval_every = 5};
}

inline TextSource source_of(Corpus const& corpus) {
  return {.paths = {"text"}, .fingerprint = corpus.fingerprint()};
}

// Trains the state to its end, or to `stop_at`, saving into the folder as the program does.
inline RunEnd train(TrainingState& state, Corpus const& corpus, std::filesystem::path const& folder,
                    int threads, std::int64_t stop_at = 0) {
  Context const context = cpu_context(threads);
  Trainer trainer(context, state, corpus);
  std::atomic<bool> stop{false};
  return trainer.run({.save_every = 7,
                      .stop = &stop,
                      .save = [&] { save_run(folder, state); },
                      .report = [&](Progress const& p) { stop = p.step == stop_at; }});
}

}  // namespace tessera::lm
