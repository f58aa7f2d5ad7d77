// SPDX-License-Identifier: Apache-2.0
#include "lm/run_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <system_error>

#include "lm/adamw.hpp"
#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/gnuplot.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;

namespace {

std::int64_t num_snapshots(TrainingState const& state) { return state.step / History::kLoadEvery; }

// One small heat map per layer in the lower half, below the curve.
std::string heat_maps(std::int64_t shown, bool crisp) {
  constexpr double kTop = 0.46, kBottom = 0.07, kGap = 0.012;
  double const height = (kTop - kBottom) / static_cast<double>(shown);
  std::string script;
  for (std::int64_t layer = 0; layer < shown; ++layer) {
    double const top = kTop - static_cast<double>(layer) * height;
    std::string extra;
    if (layer == 0) extra += "set title 'Load of each expert (1 = balanced)' offset 0, -0.7\n";
    if (layer == 1) extra += "unset title\n";
    if (layer + 1 == shown) extra += "set xlabel 'step'\nset format x '%g'\n";
    script += fmt::format(
        "set tmargin at screen {:.4f}\nset bmargin at screen {:.4f}\nset ylabel 'layer {}'\n{}"
        "plot '{}' skip 1 index {} using 2:3:4 with image{} notitle\n",
        top, top - height + kGap, layer, extra, kExpertLoadFile, layer, crisp ? " pixels" : "");
  }
  return script;
}

// A run, or anything that one would write over: the checkpoint of another program, too, whole or in shards.
bool holds_run(fs::path const& folder) {
  auto const is_there = [&](char const* name) {
    std::error_code error;
    return fs::exists(fs::symlink_status(folder / name, error));
  };
  return is_there(kIndexFile) || std::any_of(std::begin(kRunFiles), std::end(kRunFiles), is_there);
}

// Returns the folder's new name: the first that is free.
fs::path move_away(fs::path const& folder) {
  fs::path plain = folder.lexically_normal();
  if (!plain.has_filename()) plain = plain.parent_path();  // a trailing slash
  fs::path kept;
  std::error_code error;
  for (int number = 1; kept.empty() || fs::exists(kept, error); ++number) {
    kept = fmt::format("{}-{}", plain.string(), number);
  }
  fs::rename(plain, kept, error);
  if (error) {
    throw InputError(
        fmt::format("{}: holds a run that cannot be moved to {}: {}; choose another --out",
                    folder.string(), kept.string(), error.message()));
  }
  return kept;
}

}  // namespace

PreparedFolder prepare_folder(fs::path const& folder) {
  make_folder(folder);
  PreparedFolder prepared{.lock = FolderLock(folder), .kept = {}};
  if (holds_run(folder)) {
    prepared.kept = move_away(folder);
    make_folder(folder);
    prepared.lock = FolderLock(folder);  // the first one went with the earlier run
  }
  make_writable_folder(folder);
  return prepared;
}

void save_run(fs::path const& folder, TrainingState const& state) {
  save_state(folder, state);
  save_model(folder, state.options.model, state.parameters);
  write_atomically(folder / kLossFile, loss_csv(state));
  write_atomically(folder / kExpertLoadFile, expert_load_csv(state));
}

std::string loss_csv(TrainingState const& state) {
  TrainingOptions const& o = state.options;
  std::string csv =
      "step,train_bits_per_byte,held_out_bits_per_byte,learning_rate,expert_balance\n";
  for (std::int64_t step = 1; step <= state.step; ++step) {
    auto const i = static_cast<std::size_t>(step - 1);
    bool const evaluated = step % o.eval_every == 0;
    std::string const held_out =
        evaluated
            ? fmt::format("{:.5f}",
                          state.history.held_out[static_cast<std::size_t>(step / o.eval_every - 1)])
            : "";
    fmt::format_to(std::back_inserter(csv), "{},{:.5f},{},{:.6g},{:.4f}\n", step,
                   state.history.loss[i], held_out,
                   learning_rate(o.rate, o.warmup, o.schedule_span(), step),
                   state.history.balance[i]);
  }
  return csv;
}

std::string expert_load_csv(TrainingState const& state) {
  ModelConfig const& c = state.options.model;
  std::string csv = "layer,step,expert,load\n";
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    if (layer > 0) csv += "\n\n";
    for (std::int64_t snapshot = 0; snapshot < num_snapshots(state); ++snapshot) {
      for (std::int64_t expert = 0; expert < c.experts; ++expert) {
        std::int64_t const at = (snapshot * c.layers + layer) * c.experts + expert;
        fmt::format_to(std::back_inserter(csv), "{},{},{},{:.4f}\n", layer,
                       (snapshot + 1) * History::kLoadEvery, expert,
                       state.history.expert_load[static_cast<std::size_t>(at)]);
      }
    }
  }
  return csv;
}

std::string plot_script(TrainingState const& state, double bigram) {
  constexpr std::int64_t kMaxLayers = 12;
  constexpr std::int64_t kMaxCrisp =
      200;  // snapshots drawn as rectangles; an embedded bitmap beyond
  ModelConfig const& c = state.options.model;
  // An image needs two points each way.
  bool const images = num_snapshots(state) >= 2 && c.experts >= 2;
  std::int64_t const shown = images ? std::min(c.layers, kMaxLayers) : 0;
  std::string script = fmt::format(
      "# Draws {0}: gnuplot {1}\n"
      "set terminal svg size 900, {2} background 'white' font 'sans,13'\n"
      "set output '{0}'\n"
      "set datafile separator ','\n"
      "set lmargin at screen 0.09\nset rmargin at screen 0.9\nset xrange [0:{3}]\n"
      "set multiplot\n"
      "set tmargin at screen 0.95\nset bmargin at screen {4}\n"
      "set title 'Bits per byte' offset 0, -0.5\nset grid\nset key top right\n"
      "plot '{5}' skip 1 using 1:2 with lines lc rgb '#9ec5e8' title 'training batch', \\\n"
      "     '' skip 1 using 1:3 with linespoints pt 7 ps 0.4 lw 2 lc rgb '#1f5fa8' title 'held "
      "out', \\\n"
      "     {6:.5f} with lines dt 2 lw 2 lc rgb '#c0392b' title 'bigram, held out'\n",
      kPlotFile, kPlotScript, 420 + 110 * shown, state.step, shown > 0 ? 0.54 : 0.1, kLossFile,
      bigram);
  if (shown > 0) {
    script += fmt::format(
        "unset grid\nset yrange [-0.5:{}.5]\nset ytics 0, {}\n"
        "set cbrange [0:3]\nset cbtics 1\nset format x ''\n"
        "set palette defined (0 'white', 1 '#9ec5e8', 3 '#0b2f57')\n",
        c.experts - 1, std::max<std::int64_t>(1, c.experts / 4));
    script += heat_maps(shown, num_snapshots(state) <= kMaxCrisp);
  }
  return script + "unset multiplot\n";
}

std::string draw_curve(fs::path const& folder, TrainingState const& state, double bigram) {
  write_atomically(folder / kPlotScript, plot_script(state, bigram));
  return draw_with_gnuplot(folder, kPlotScript, kPlotFile);
}

}  // namespace tessera::lm
