// SPDX-License-Identifier: Apache-2.0
#include "cli/output.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>

#include "cli/commands.hpp"
#include "tessera/names.hpp"
#include "tessera/router.hpp"

namespace tessera::cli {

void print_text(std::string const& text) {
  bool const written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0)
    throw CommandError("stdout: cannot be written", kEnvironment);
}

void note_constant_scores(MoeDesc const& desc) {
  if (!scores_are_constant(desc)) return;
  print_note(fmt::format(
      "note: --router {}{} with --experts {} and --top-k {}: every score is one number whatever "
      "the "
      "logits are, so no gradient of the output reaches the router and it cannot learn; use "
      "{}--router sigmoid-bias without --normalize-scores\n",
      name_of(kRouterNames, desc.router.kind),
      desc.router.normalize_scores ? " --normalize-scores" : "", desc.shape.experts,
      desc.shape.top_k, desc.shape.experts == 1 ? "" : "--router softmax-topk, or "));
}

void print_json(Json const& document) {
  print_text(document.dump(1, ' ', false, Json::error_handler_t::replace) + '\n');
}

void print_note(std::string_view text) noexcept {
  std::size_t const written = std::fwrite(text.data(), 1, text.size(), stderr);
  static_cast<void>(written);
}

std::string bytes_text(double bytes) {
  char const* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, units[unit]);
}

Json shape_json(MoeShape const& shape) {
  return {{"tokens", shape.tokens},
          {"hidden", shape.hidden},
          {"intermediate", shape.intermediate},
          {"experts", shape.experts},
          {"top_k", shape.top_k}};
}

Json saved_json(MoeDesc const& desc, SavedBytes const& saved) {
  Json out = {{"x", saved.x}, {"h", saved.h}, {"routing", saved.routing}};
  if (!desc.quantises()) return out;
  out["x_scale"] = saved.x_scale;
  out["h_scale"] = saved.h_scale;
  return out;
}

std::string today() {
  char date[16] = {};
  std::time_t const now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::strftime(date, sizeof(date), "%Y-%m-%d", &parts);
  return date;
}

double physical_memory_bytes() noexcept {
  long const pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<double>(pages) * static_cast<double>(page) : 0;
}

void require_memory(double bytes) {
  double const physical = physical_memory_bytes();
  if (physical > 0 && bytes > physical) {
    throw CommandError(
        fmt::format("memory: the shape needs about {}, this machine has {}; choose a smaller shape",
                    bytes_text(bytes), bytes_text(physical)),
        kEnvironment);
  }
}

}  // namespace tessera::cli
