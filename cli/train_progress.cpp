// SPDX-License-Identifier: Apache-2.0
#include "cli/train_progress.hpp"

#include <fmt/format.h>

#include <chrono>
#include <string>

#include "cli/commands.hpp"

namespace tessera::cli {

namespace {

constexpr double kRedrawSeconds = 0.1;

double now() {
  auto const time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

std::string clock_text(double seconds) {
  auto const whole = static_cast<long>(seconds + 0.5);
  if (whole >= 3600) {
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  }
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string line_of(lm::Progress const& p, bool colour) {
  std::string const bold = colour ? "\033[1m" : "", plain = colour ? "\033[0m" : "";
  std::string const held_out = p.held_out > 0 ? fmt::format("  held-out {:.3f}", p.held_out) : "";
  return fmt::format(
      "step {}{:>{}}/{}{}  loss {}{:.3f}{} bits/byte{}  {:.0f} tokens/s  balance {:.2f}  ETA {}",
      bold, p.step, std::to_string(p.steps).size(), p.steps, plain, bold, p.loss, plain, held_out,
      p.tokens_per_second, p.balance, clock_text(p.seconds_left));
}

}  // namespace

TrainProgress::TrainProgress() : terminal_(is_terminal(stderr)), colour_(use_colour(stderr)) {}

void TrainProgress::report(lm::Progress const& progress) {
  bool const last = progress.step == progress.steps;
  if (terminal_) {
    double const time = now();
    if (!last && time - last_drawn_ < kRedrawSeconds) return;
    last_drawn_ = time;
    fmt::print(stderr, "\r{}\033[K", line_of(progress, colour_));
    open_ = true;
  } else {
    long const tenth = static_cast<long>(progress.step * 10 / progress.steps);
    if (tenth == last_tenth_) return;
    last_tenth_ = tenth;
    fmt::print(stderr, "{}\n", line_of(progress, false));
  }
  std::fflush(stderr);
}

void TrainProgress::finish() {
  if (open_) fmt::print(stderr, "\n");
  open_ = false;
}

}  // namespace tessera::cli
