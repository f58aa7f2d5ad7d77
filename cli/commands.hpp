// SPDX-License-Identifier: Apache-2.0
// The subcommands of `tessera`, one cli/<name>.cpp each.
//
// add_<name>(app) declares a subcommand with its options and hands its body to run_with(). A body returns
// one of the exit codes below, or throws CommandError, whose text main() prints as one line on stderr.
// Results go to stdout; progress, notes and errors go to stderr.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#include "tessera/status.hpp"

namespace tessera::cli {

inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadUsage = 2;     ///< bad options or input
inline constexpr int kEnvironment = 3;  ///< the device or machine lacks something

/// Ends a command with one line on stderr: "rule: offending value; remedy".
class CommandError : public std::runtime_error {
 public:
  explicit CommandError(std::string const& text, int exit_code = kBadUsage)
      : std::runtime_error(text), exit_code_(exit_code) {}
  [[nodiscard]] int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

/// The exit code that reports a failed library call.
int exit_code(Status const& status) noexcept;

/// Throws CommandError with the library's own text unless `status` is ok.
void check(Status const& status);

/// The value, or check() of its status.
template <class T>
T value_of(Expected<T>&& expected) {
  check(expected.status());
  return std::move(expected).value();
}

/// Runs `body` when `command` was chosen; what it returns is the program's exit code. `example` is shown
/// below the options of --help.
void run_with(CLI::App& command, std::string const& example, std::function<int()> body);

/// Takes numbers within [low, high] and, unlike CLI::Range, nothing that is no number.
CLI::Validator number_in(double low, double high);

/// Returns how this program was called: what the commands that it prints start with.
std::string& program_name() noexcept;

/// True if `stream` is a terminal, so that lines may be redrawn there.
bool is_terminal(std::FILE* stream) noexcept;

/// True if `stream` takes colours: a terminal, and NO_COLOR is unset or empty.
bool use_colour(std::FILE* stream) noexcept;

void add_info(CLI::App& app);
void add_explain(CLI::App& app);
void add_plan(CLI::App& app);
void add_verify(CLI::App& app);
void add_bench(CLI::App& app);
void add_train(CLI::App& app);
void add_convert(CLI::App& app);
void add_generate(CLI::App& app);

}  // namespace tessera::cli
