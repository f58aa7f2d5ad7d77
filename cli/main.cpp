// SPDX-License-Identifier: Apache-2.0
// tessera: options in, exit code out. 0 ok, 1 a check failed, 2 bad usage or input, 3 environment.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "cli/commands.hpp"
#include "device/device.hpp"
#include "tessera/version.hpp"

namespace tessera::cli {
namespace {

std::function<int()>& chosen_body() {
  static std::function<int()> body;
  return body;
}

int fail(std::string text, int code) {
  for (char& c : text) {  // one line, and nothing that a terminal would obey
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  bool const colour = use_colour(stderr);
  std::fprintf(stderr, "%stessera: %s%s\n", colour ? "\033[31m" : "", text.c_str(),
               colour ? "\033[0m" : "");
  return code;
}

// Takes the numbers of standard streams that are closed. Otherwise the next file to be opened gets one, and then what
// is printed.
void reserve_standard_streams() noexcept {
  for (int const stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest free number is this one. Reading stdin and writing the others fails as before.
    ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// Digits alone: the parser takes 010 for 8, 0x10 for 16, -1 for 2^64 - 1 and whatever is too large for the largest.
std::string whole_number(std::string const& text, bool has_sign) {
  char const* const sort =
      has_sign ? "a whole number in [-2^63, 2^63)" : "a whole number in [0, 2^64)";
  char const* const first = text.data();
  char const* const last = first + text.size();
  std::string const digits = text.substr(has_sign && text.starts_with('-') ? 1 : 0);
  bool const plain = digits.size() == 1 || (!digits.empty() && digits[0] != '0');
  std::int64_t with_sign = 0;
  std::uint64_t without = 0;
  auto const [end, error] =
      has_sign ? std::from_chars(first, last, with_sign) : std::from_chars(first, last, without);
  if (plain && error == std::errc{} && end == last) return {};
  return fmt::format("'{}' is not {}", text, sort);
}

std::string fp32_number(std::string const& text) {
  double value = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  bool const number = error == std::errc{} && end == text.data() + text.size();
  // Infinity may be meant, as of --limit; what grows to it is not.
  if (!number || std::isnan(value) || (value != 0 && static_cast<float>(value) == 0) ||
      (std::isinf(static_cast<float>(value)) && !std::isinf(value))) {
    return fmt::format("'{}' is not a number that fp32 can hold", text);
  }
  return {};
}

// Options that hold numbers, in commands and their groups, known by the name of their type.
void check_numbers(CLI::App& app) {
  for (CLI::Option* const option : app.get_options([](CLI::Option const*) { return true; })) {
    std::string type = option->get_type_name();
    type.resize(std::min(type.size(), type.find(':')));
    bool const has_sign = type == "INT" || type == "T" || type == "d" || type == "n" ||
                          type == "E" || type == "K" || type == "N";
    if (has_sign || type == "UINT") {
      option->check(CLI::Validator(
          [has_sign](std::string const& text) { return whole_number(text, has_sign); }, ""));
    } else if (type == "FLOAT") {
      option->check(CLI::Validator(fp32_number, ""));
    }
  }
  for (CLI::App* const command : app.get_subcommands([](CLI::App const*) { return true; })) {
    check_numbers(*command);
  }
}

int parse_and_run(int argc, char** argv) {
  if (argc > 0 && argv[0][0] != '\0') program_name() = argv[0];
  CLI::App app{"Mixture-of-Experts layers: check, time and explain them, train a small model."};
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.require_subcommand(0, 1);
  add_info(app);
  add_verify(app);
  add_bench(app);
  add_explain(app);
  add_plan(app);
  add_train(app);
  add_convert(app);
  add_generate(app);
  check_numbers(app);
  try {
    app.parse(argc, argv);
  } catch (CLI::Success const& request) {  // --help, --version
    app.exit(request);
    return kOk;
  } catch (CLI::ParseError const& error) {
    std::string help = "tessera";
    for (CLI::App const* const command : app.get_subcommands()) help += " " + command->get_name();
    std::string text = error.what();
    if (dynamic_cast<CLI::ExtrasError const*>(&error) != nullptr) {
      text = help + " takes no " + CLI::detail::join(app.remaining(true), " ");  // in their order
    }
    return fail(fmt::format("{}; see {} --help", text, help), kBadUsage);
  }
  if (!chosen_body()) return fail("a subcommand is needed; see tessera --help", kBadUsage);
  return chosen_body()();
}

}  // namespace

int exit_code(Status const& status) noexcept {
  switch (status.code()) {
    case StatusCode::ok:
      return kOk;
    case StatusCode::invalid_argument:
    case StatusCode::unsupported:
      return kBadUsage;
    case StatusCode::environment:
    case StatusCode::device_error:
    case StatusCode::out_of_memory:
      return kEnvironment;
    case StatusCode::internal:
      break;
  }
  return kCheckFailed;
}

void check(Status const& status) {
  if (!status.ok()) throw CommandError(status.text(), exit_code(status));
}

CLI::Validator number_in(double low, double high) {
  auto const check_range = [low, high](std::string const& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return {};
    return fmt::format("{} is not a number in [{:g}, {:g}]", text, low, high);
  };
  return {check_range, fmt::format("in [{:g}, {:g}]", low, high)};
}

std::string& program_name() noexcept {
  static std::string name = "tessera";
  return name;
}

void run_with(CLI::App& command, std::string const& example, std::function<int()> body) {
  command.footer("Example:\n  " + example);
  command.callback([body = std::move(body)] { chosen_body() = body; });
}

bool is_terminal(std::FILE* stream) noexcept { return ::isatty(::fileno(stream)) == 1; }

bool use_colour(std::FILE* stream) noexcept {
  char const* const no_color = std::getenv("NO_COLOR");
  return is_terminal(stream) && (no_color == nullptr || *no_color == '\0');
}

}  // namespace tessera::cli

int main(int argc, char** argv) {
  using namespace tessera::cli;
  reserve_standard_streams();
  try {
    return parse_and_run(argc, argv);
  } catch (CommandError const& error) {
    return fail(error.what(), error.exit_code());
  } catch (
      std::invalid_argument const& error) {  // flags that contradict each other (verify/case.hpp)
    return fail(error.what(), kBadUsage);
  } catch (tessera::device::Error const& error) {
    return fail(error.what(), kEnvironment);
  } catch (std::bad_alloc const&) {
    return fail("out of memory; choose a smaller shape", kEnvironment);
  } catch (std::exception const& error) {
    return fail(error.what(), kCheckFailed);
  }
}
