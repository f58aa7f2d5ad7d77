// SPDX-License-Identifier: Apache-2.0
#include "cli/lm_command.hpp"

#include <csignal>

namespace tessera::cli {

namespace {

std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set from a signal handler");

void request_stop(int signal) {
  stop_requested = true;
  std::signal(signal, SIG_DFL);
}

}  // namespace

StopSignals::StopSignals() {
  stop_requested = false;
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
}

StopSignals::~StopSignals() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

std::atomic<bool> const& StopSignals::requested() noexcept { return stop_requested; }

void ignore_broken_pipes() noexcept { std::signal(SIGPIPE, SIG_IGN); }

Context make_context(std::int32_t threads) {
  return value_of(Context::create({.device = {}, .num_threads = threads}));
}

}  // namespace tessera::cli
