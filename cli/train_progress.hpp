// SPDX-License-Identifier: Apache-2.0
// The progress line of `tessera train`: redrawn in place on a terminal, a line every tenth elsewhere.
#pragma once

#include <cstdint>

#include "lm/trainer.hpp"

namespace tessera::cli {

class TrainProgress {
 public:
  TrainProgress();
  ~TrainProgress() { finish(); }
  TrainProgress(TrainProgress const&) = delete;
  TrainProgress& operator=(TrainProgress const&) = delete;
  void report(lm::Progress const& progress);
  /// Shows the evaluation at the end of the run; `name` says of what.
  void evaluation(char const* name, std::int64_t done, std::int64_t windows);
  /// Ends the line that is being redrawn.
  void finish();

 private:
  bool terminal_, colour_;
  double last_drawn_ = 0;
  long last_tenth_ = -1;
  bool open_ = false;
};

}  // namespace tessera::cli
