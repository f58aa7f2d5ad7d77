// SPDX-License-Identifier: Apache-2.0
// tessera convert: a checkpoint's experts in another layout, or back under Hugging Face's names.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "cli/commands.hpp"
#include "cli/lm_command.hpp"
#include "cli/output.hpp"
#include "cli/shape_flags.hpp"
#include "huggingface/convert.hpp"
#include "huggingface/expert_names.hpp"
#include "lm/text.hpp"
#include "tessera/names.hpp"

namespace tessera::cli {
namespace {

constexpr char const* kHuggingFace = "huggingface";

struct Flags {
  std::string from, to, layout;
  double shard_gigabytes = 5;
  bool json = false;
};

// One line: redrawn on a terminal, else printed at every tenth.
class ByteProgress {
 public:
  ~ByteProgress() {
    if (open_) print_note("\n");
  }
  void report(std::uint64_t done, std::uint64_t total) {
    using Seconds = std::chrono::duration<double>;
    double const seconds = Seconds(std::chrono::steady_clock::now() - begin_).count();
    auto const part = static_cast<double>(done) / static_cast<double>(total);
    bool const last = done == total;
    if (terminal_ ? !last && seconds - drawn_ < 0.1 : part * 10 < tenth_ + 1 && !last) return;
    drawn_ = seconds;
    tenth_ = static_cast<int>(part * 10);
    std::string const line = fmt::format(
        "{:3.0f} %  {} of {}  {}/s  ETA {:.0f} s", 100 * part,
        bytes_text(static_cast<double>(done)), bytes_text(static_cast<double>(total)),
        bytes_text(static_cast<double>(done) / std::max(seconds, 1e-3)), seconds * (1 / part - 1));
    print_note(terminal_ ? "\r" + line + "\033[K" : line + "\n");
    open_ = terminal_;
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool const terminal_ = is_terminal(stderr);
  bool open_ = false;
  double drawn_ = -1;
  int tenth_ = 0;
};

huggingface::ConvertOptions read_options(Flags const& flags) {
  huggingface::ConvertOptions options;
  options.from = flags.from;
  options.to = flags.to;
  if (flags.layout != kHuggingFace) options.layout = read_layout(flags.layout);
  options.shard_bytes = static_cast<std::uint64_t>(flags.shard_gigabytes * 1e9);
  options.stop = &StopSignals::requested();
  return options;
}

Json summary_json(Flags const& flags, huggingface::ConvertSummary const& summary) {
  return {{"end", summary.stopped ? "stopped" : "finished"},
          {"from", flags.from},
          {"from_layout", summary.from_layout},
          {"to", flags.to},
          {"to_layout", summary.to_layout},
          {"moe_layers", summary.moe_layers},
          {"tensors", summary.tensors},
          {"tensor_bytes", summary.bytes},
          {"files", summary.files},
          {"left_behind", summary.left_behind}};
}

int convert(Flags const& flags) {
  ignore_broken_pipes();
  huggingface::ConvertOptions options = read_options(flags);
  StopSignals const signals;
  huggingface::ConvertSummary summary;
  {
    ByteProgress progress;
    options.report = [&](std::uint64_t done, std::uint64_t total) { progress.report(done, total); };
    summary = huggingface::convert(options);
  }
  if (flags.json) print_json(summary_json(flags, summary));
  if (summary.stopped) {
    print_note(fmt::format("stopped: nothing was written to {}\n", flags.to));
    return kCheckFailed;
  }
  if (!summary.left_behind.empty()) {
    print_note(fmt::format("note: not copied: {}\n", lm::joined(summary.left_behind, ", ")));
  }
  if (!flags.json) {
    print_text(fmt::format("{}: {} layers of experts, {} tensors, {}, from {} to {}\n", flags.to,
                           summary.moe_layers, summary.tensors,
                           bytes_text(static_cast<double>(summary.bytes)), summary.from_layout,
                           summary.to_layout));
  }
  return kOk;
}

}  // namespace

void add_convert(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "convert", "Rewrite a checkpoint's experts in another layout, bit for bit");
  auto const flags = std::make_shared<Flags>();
  command
      .add_option(
          "--from", flags->from,
          std::string("folder of config.json and safetensors files; experts are found by their "
                      "names: ") +
              huggingface::known_spellings())
      ->required();
  command.add_option("--to", flags->to, "folder to be made: appears whole or not at all")
      ->required();
  command
      .add_option("--layout", flags->layout,
                  "concat interleaved up-first transposed separate blocked:B, "
                  "transposed-interleaved transposed-up-first transposed-blocked:B; or "
                  "huggingface: as Hugging Face stores the model")
      ->required();
  command.add_option("--shard-gb", flags->shard_gigabytes, "size at which files are cut")
      ->check(number_in(1e-6, 1e6))
      ->capture_default_str();
  command.add_flag("--json", flags->json, "a summary as JSON on stdout");
  run_with(command,
           "tessera convert --from Qwen3-30B-A3B --to qwen3-interleaved --layout interleaved",
           [flags] { return with_lm_errors([&] { return convert(*flags); }); });
}

}  // namespace tessera::cli
