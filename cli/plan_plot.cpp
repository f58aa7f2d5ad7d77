// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_plot.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <iterator>

#include "cli/commands.hpp"
#include "cli/lm_command.hpp"
#include "cli/plan_layer.hpp"
#include "lm/files.hpp"
#include "lm/gnuplot.hpp"
#include "lm/text.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr double kMebibyte = 1024.0 * 1024.0;
constexpr std::int64_t kMaxTokens = 1 << 18;

// Columns: d/n, then MiB saved under each policy.
std::string memory_table(MoeDesc const& desc) {
  std::string table;
  for (MoeDesc const& finer : granularities(desc)) {
    table += fmt::format("{:.6g}", static_cast<double>(finer.shape.hidden) /
                                       static_cast<double>(finer.shape.intermediate));
    for (MemoryPlan const& plan : memory_plans(finer)) {
      if (!plan.has_curve) continue;
      fmt::format_to(std::back_inserter(table), " {:.6g}", plan.saved / kMebibyte);
    }
    table += '\n';
  }
  return table;
}

// Columns: T, waste in %.
std::string waste_table(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  std::string table;
  for (std::int64_t tokens = 512; tokens <= kMaxTokens; tokens *= 2) {
    fmt::format_to(std::back_inserter(table), "{} {:.6g}\n", tokens,
                   100 * expected_tile_waste(tokens, s.experts, s.top_k, desc.router.tile));
  }
  return table;
}

std::string memory_lines(MoeDesc const& desc) {
  // Colours that stay apart for colour-blind readers and in print.
  constexpr char const* kColours[] = {"#0072b2", "#56b4e9", "#999999",
                                      "#e69f00", "#cc79a7", "#d55e00"};
  std::vector<std::string> lines;
  std::size_t column = 0;
  for (MemoryPlan const& plan : memory_plans(desc)) {
    if (!plan.has_curve) continue;
    lines.push_back(
        fmt::format("$memory using 1:{} with linespoints pt 7 ps 0.5 lw 2 lc rgb '{}' "
                    "title '{}'",
                    column + 2, kColours[column % std::size(kColours)], plan.policy));
    ++column;
  }
  return lm::joined(lines, ", \\\n     ");
}

}  // namespace

std::string plan_plot_script(std::string const& picture, MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  return fmt::format(
      "$memory << END\n{}END\n$waste << END\n{}END\n"
      "set terminal svg size 1100, 460 background 'white' font 'sans,13'\n"
      "set output '{}'\n"
      "set multiplot layout 1, 2\nset grid\nset rmargin 5\n"
      "set title 'Saved for backward per layer, T = {}, n*K = {}'\n"
      "set xlabel 'granularity d/n (finer experts to the right)'\nset ylabel 'MiB'\n"
      "set logscale x 2\nset yrange [0:*]\nset key top left\n"
      "plot {}\n"
      "set title 'Tile waste, E = {}, K = {}, {} rows per tile'\n"
      "set xlabel 'tokens T'\nset ylabel '% of routed rows'\nset logscale y 10\n"
      "set yrange [*:*]\nset key top right\nset format x '%.0f'\nset xtics rotate by -45\n"
      "plot $waste using 1:2 with linespoints pt 7 ps 0.5 lw 2 lc rgb '#0072b2' title 'expected, "
      "uniform routing'\n"
      "unset multiplot\n",
      memory_table(desc), waste_table(desc), picture, s.tokens, s.intermediate * s.top_k,
      memory_lines(desc), s.experts, s.top_k, desc.router.tile);
}

void draw_plan(std::string const& file, MoeDesc const& desc) {
  fs::path const picture(file);
  std::string const name = picture.filename().string();
  if (picture.extension() != ".svg" || name.find('\'') != std::string::npos) {
    throw CommandError(fmt::format(
        "--plot {}: pictures are SVG; give a name that ends in .svg, without quotes", file));
  }
  fs::path const folder = picture.has_parent_path() ? picture.parent_path() : ".";
  std::string const script = picture.stem().string() + ".gp";
  with_lm_errors([&] {
    lm::write_atomically(folder / script, plan_plot_script(name, desc));
    return kOk;
  });
  if (std::string const problem = lm::draw_with_gnuplot(folder, script, name); !problem.empty()) {
    throw CommandError(problem, kEnvironment);
  }
}

}  // namespace tessera::cli
