// SPDX-License-Identifier: Apache-2.0
#include "cli/train_progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "cli/clock.hpp"
#include "cli/commands.hpp"
#include "cli/output.hpp"

namespace tessera::cli {

namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr double kLineSeconds = 5;  // between lines about the evaluation

std::string clock_text(double seconds) {
  auto const whole = static_cast<long>(seconds + 0.5);
  if (whole >= 3600) {
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  }
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string line_of(lm::Progress const& p) {
  std::string const held_out = p.held_out > 0 ? fmt::format("  held-out {:.3f}", p.held_out) : "";
  std::string const idle = p.load.idle > 0 ? fmt::format(", {} idle", p.load.idle) : "";
  return fmt::format(
      "step {:>{}}/{}  loss {:.3f} bits/byte{}  {:.0f} tokens/s  balance {:.2f}{}  ETA {}", p.step,
      std::to_string(p.steps).size(), p.steps, p.loss, held_out, p.tokens_per_second,
      p.load.max_over_mean, idle, clock_text(p.seconds_left));
}

// A line that wraps cannot be redrawn: what does not fit is left out.
std::string fit_to_terminal(std::string const& line) {
  struct winsize size{};
  bool const known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? line.substr(0, size.ws_col - 1u) : line;
}

// The step stands out.
std::string emphasised(std::string const& line) {
  std::size_t const end = std::min(line.find("  loss"), line.size());
  return "\033[1m" + line.substr(0, end) + "\033[0m" + line.substr(end);
}

}  // namespace

TrainProgress::TrainProgress() : terminal_(is_terminal(stderr)), colour_(use_colour(stderr)) {}

void TrainProgress::report(lm::Progress const& progress) {
  bool const last = progress.step == progress.steps;
  if (terminal_) {
    double const time = now_seconds();
    if (!last && time - last_drawn_ < kRedrawSeconds) return;
    last_drawn_ = time;
    std::string const line = fit_to_terminal(line_of(progress));
    print_note(fmt::format("\r{}\033[K", colour_ ? emphasised(line) : line));
    open_ = true;
  } else {
    last_drawn_ = now_seconds();
    long const tenth = static_cast<long>(progress.step * 10 / progress.steps);
    if (tenth == last_tenth_) return;
    last_tenth_ = tenth;
    print_note(line_of(progress) + "\n");
  }
}

void TrainProgress::evaluation(char const* name, std::int64_t done, std::int64_t windows) {
  double const time = now_seconds();
  if (time - last_drawn_ < (terminal_ ? kRedrawSeconds : kLineSeconds)) return;
  last_drawn_ = time;
  std::string const line = fmt::format("evaluating {}: window {}/{}", name, done, windows);
  print_note(terminal_ ? fmt::format("\r{}\033[K", fit_to_terminal(line)) : line + "\n");
  open_ = terminal_;
}

void TrainProgress::finish() {
  if (open_) print_note("\n");
  open_ = false;
}

}  // namespace tessera::cli
