// SPDX-License-Identifier: Apache-2.0
// train, generate and convert share this: errors of the language model as exit codes, Ctrl-C as a flag, readers that
// have gone.
#pragma once

#include <atomic>
#include <cstdint>

#include "cli/commands.hpp"
#include "lm/error.hpp"
#include "tessera/context.hpp"

namespace tessera::cli {

/// body(), its errors turned into CommandError.
template <class Body>
int with_lm_errors(Body const& body) {
  try {
    return body();
  } catch (lm::InputError const& error) {
    throw CommandError(error.what(), kBadUsage);
  } catch (lm::EnvironmentError const& error) {
    throw CommandError(error.what(), kEnvironment);
  }
}

/// While it lives, the first SIGINT or SIGTERM sets the flag; a second one ends the program at once.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(StopSignals const&) = delete;
  StopSignals& operator=(StopSignals const&) = delete;
  [[nodiscard]] static std::atomic<bool> const& requested() noexcept;
};

/// A reader of stdout or stderr that has gone makes writing fail there instead of ending the program.
void ignore_broken_pipes() noexcept;

/// A CPU context with that many threads (0: all).
Context make_context(std::int32_t threads);

}  // namespace tessera::cli
