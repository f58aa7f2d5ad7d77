// SPDX-License-Identifier: Apache-2.0
// Whatever describes a training state, beside the tensors of a small one: a state that can go on, or an
// InputError.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "tests/fuzz/file_of.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// training_state.safetensors of corpus/state/small.json, with another description.
std::string state_file(std::string const& description) {
  constexpr int kParameters = 546;
  json header = {{"__metadata__", {{"tessera_training", description}}}};
  int next = 0;
  auto const add = [&](char const* name, int count) {
    header[name] = {
        {"dtype", "F32"}, {"shape", {count}}, {"data_offsets", {next, next + 4 * count}}};
    next += 4 * count;
  };
  for (char const* name : {"parameters", "adamw.first", "adamw.second"}) add(name, kParameters);
  for (char const* name : {"history.loss", "history.balance"}) add(name, 10);
  add("history.held_out", 2);
  add("history.expert_load", 1);
  std::string const text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  std::uint64_t const length = text.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + text + std::string(static_cast<std::size_t>(next), '\0');
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  using namespace tessera::lm;
  static fs::path const folder =
      fs::temp_directory_path() / ("tessera_state_fuzz_" + std::to_string(::getpid()));
  std::string const file = state_file({reinterpret_cast<char const*>(data), size});
  tessera::fuzz::FileOf const input(reinterpret_cast<std::uint8_t const*>(file.data()),
                                    file.size());
  fs::create_directories(folder);
  fs::create_symlink(input.path(), folder / kStateFile);
  try {
    TrainingState const state = load_state(folder);
    auto const wanted = static_cast<std::size_t>(parameter_count(state.options.model));
    if (state.parameters.size() != wanted || state.step > state.options.steps) std::abort();
  } catch (InputError const&) {
  }
  fs::remove_all(folder);
  return 0;
}
