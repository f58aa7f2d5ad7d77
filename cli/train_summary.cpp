// SPDX-License-Identifier: Apache-2.0
#include "cli/train_summary.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "lm/evaluation.hpp"
#include "lm/text.hpp"

namespace tessera::cli {
namespace {

std::vector<std::string> files_of(TrainRun const& run) {
  std::vector<std::string> files;
  for (char const* name : lm::kRunFiles) {
    if (std::filesystem::exists(run.folder / name)) files.push_back((run.folder / name).string());
  }
  return files;
}

std::string resume_command(TrainRun const& run) {
  return fmt::format("{} train --resume {}", program_name(), run.folder.string());
}
std::string generate_command(TrainRun const& run) {
  return fmt::format("{} generate --checkpoint {} --prompt \"The \"", program_name(),
                     run.folder.string());
}

}  // namespace

void print_train_summary(TrainRun const& run, TrainSummary const& summary) {
  if (summary.end == lm::RunEnd::stopped) {
    print_note(fmt::format("stopped after step {}; everything is saved\n", run.state.step));
  } else if (!summary.held_out || !summary.without_moe) {
    print_note("stopped while evaluating held-out text; everything is saved\n");
  } else {
    print_note(fmt::format(
        "held-out bits/byte: model {:.3f}, bigram {:.3f} (ratio {:.3f}); MoE blocks zeroed "
        "{:.3f} ({:+.3f})\n",
        *summary.held_out, summary.bigram, *summary.held_out / summary.bigram, *summary.without_moe,
        *summary.without_moe - *summary.held_out));
    std::int64_t const all =
        lm::count_windows(run.corpus.held_out.size(), run.state.options.model.context);
    if (summary.windows < all) {
      print_note(
          fmt::format("note: these are of {} of the {} windows of held-out text, spread "
                      "evenly: {}\n",
                      summary.windows, all,
                      summary.lacks_time ? "--seconds has no time for more"
                                         : "--held-out-windows 0 takes all"));
    }
  }
  if (summary.load.max_over_mean > 0) {
    lm::ModelConfig const& c = run.state.options.model;
    print_note(
        fmt::format("experts' load in the last step: largest {:.2f} times the mean, coefficient of "
                    "variation {:.2f}, {} of {} idle\n",
                    summary.load.max_over_mean, summary.load.coefficient_of_variation,
                    summary.load.idle, c.layers * c.experts));
  }
  if (!summary.plot_problem.empty()) print_note(fmt::format("note: {}\n", summary.plot_problem));
  print_note(fmt::format("files:    {}\n", lm::joined(files_of(run), "\n          ")));
  std::vector<std::string> const& paths = run.state.text.paths;
  bool const from_stdin = std::find(paths.begin(), paths.end(), "-") != paths.end();
  print_note(fmt::format("resume:   {}{}{}\n", resume_command(run),
                         run.state.step < run.state.options.steps
                             ? ""
                             : fmt::format(" --steps {}", 2 * run.state.step),
                         from_stdin ? "  (the same text on stdin)" : ""));
  print_note(fmt::format("generate: {}\n", generate_command(run)));
}

Json train_summary_json(TrainRun const& run, TrainSummary const& summary) {
  constexpr char const* kEnds[] = {"finished", "out-of-time", "stopped"};
  auto const measured = [](std::optional<double> value) { return value ? Json(*value) : Json(); };
  lm::History const& history = run.state.history;
  return {{"end", kEnds[static_cast<int>(summary.end)]},
          {"router", lm::router_name(run.state.options.model.router.kind)},
          {"round", lm::rounding_name(run.state.options.rounding)},
          {"step", run.state.step},
          {"steps", run.state.options.steps},
          {"parameters", run.state.parameters.size()},
          {"tokens_per_second", summary.tokens_per_second},
          {"train_bits_per_byte", history.loss.empty() ? Json() : Json(history.loss.back())},
          {"held_out_bits_per_byte", measured(summary.held_out)},
          {"bigram_bits_per_byte", summary.bigram},
          {"moe_zeroed_bits_per_byte", measured(summary.without_moe)},
          {"expert_balance", history.balance.empty() ? Json() : Json(history.balance.back())},
          {"expert_variation", summary.load.coefficient_of_variation},
          {"idle_experts", summary.load.idle},
          {"balance_loss", run.state.options.balance},
          {"bias_rate", lm::has_selection_bias(run.state.options.model)
                            ? Json(run.state.options.bias_rate)
                            : Json()},
          {"train_bytes", run.corpus.train.size()},
          {"held_out_bytes", run.corpus.held_out.size()},
          {"held_out_windows", summary.windows},
          {"out", run.folder.string()},
          {"files", files_of(run)},
          {"resume", resume_command(run)},
          {"generate", generate_command(run)}};
}

}  // namespace tessera::cli
