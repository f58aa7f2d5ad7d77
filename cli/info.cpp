// SPDX-License-Identifier: Apache-2.0
// tessera info: versions, how this program was built, devices and backends.
#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <thread>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "tessera/backend.hpp"
#include "tessera/context.hpp"
#include "tessera/version.hpp"

namespace tessera::cli {
namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    auto const colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("gcc {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

constexpr bool kSanitized =
#if defined(TESSERA_SANITIZED)
    true;
#else
    false;
#endif

constexpr bool kOptimised =
#if defined(__OPTIMIZE__)
    true;
#else
    false;
#endif

Json information() {
  Context const context = value_of(Context::create());
  Json backends_json = Json::array();
  for (auto const& backend : value_of(backends())) {
    backends_json.push_back({{"name", backend.name},
                             {"built", backend.built},
                             {"available", backend.available},
                             {"detail", backend.detail}});
  }
  return {
      {"version", TESSERA_VERSION},
      {"build", {{"compiler", compiler()}, {"optimised", kOptimised}, {"sanitized", kSanitized}}},
      {"devices",
       {{{"device", "cpu"},
         {"name", cpu_name()},
         {"hardware_threads", std::thread::hardware_concurrency()},
         {"threads", context.num_threads()},
         {"memory_bytes", physical_memory_bytes()}}}},
      {"backends", backends_json}};
}

std::string text_of(Json const& info) {
  std::string text =
      fmt::format("tessera {}\nbuild     {}, {}{}\n", info["version"].get<std::string>(),
                  info["build"]["compiler"].get<std::string>(),
                  kOptimised ? "optimised" : "not optimised", kSanitized ? ", sanitizers on" : "");
  for (auto const& device : info["devices"]) {
    text += fmt::format("device    {}: {}, {} threads, {}\n", device["device"].get<std::string>(),
                        device["name"].get<std::string>(), device["threads"].get<int>(),
                        bytes_text(device["memory_bytes"].get<double>()));
  }
  for (auto const& backend : info["backends"]) {
    text += fmt::format("backend   {:<5} {}: {}\n", backend["name"].get<std::string>(),
                        backend["available"].get<bool>() ? "available" : "not available",
                        backend["detail"].get<std::string>());
  }
  return text;
}

}  // namespace

void add_info(CLI::App& app) {
  auto* const command = app.add_subcommand("info", "Versions, build, devices and backends");
  auto const json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "the result as JSON on stdout");
  run_with(*command, "tessera info --json", [json] {
    Json const info = information();
    *json ? print_json(info) : print_text(text_of(info));
    return kOk;
  });
}

}  // namespace tessera::cli
