// SPDX-License-Identifier: Apache-2.0
#include "lm/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "lm/safetensors.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr int kStateFormat = 1;
constexpr char const* kStateKey = "tessera_training";

json describe(TrainingState const& state) {
  TrainingOptions const& o = state.options;
  return {{"format", kStateFormat},
          {"step", state.step},
          {"steps", o.steps},
          {"batch", o.batch},
          {"warmup", o.warmup},
          {"eval_every", o.eval_every},
          {"learning_rate", o.rate},
          {"balance", o.balance},
          {"seed", o.seed},
          {"router", router_name(o.model.router.kind)},
          {"z_loss", o.z_loss},
          {"bias_rate", o.bias_rate},
          {"round", rounding_name(o.rounding)},
          {"tile", o.tile},
          {"text", state.text.paths},
          {"text_fingerprint", state.text.fingerprint},
          {"model", to_json(o.model)}};
}

std::uint64_t json_bits(json const& object, char const* key) {
  auto const found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) {
    throw InputError(fmt::format("{} is missing or not a natural number", key));
  }
  return found->get<std::uint64_t>();
}

std::vector<std::string> text_paths(json const& object) {
  std::vector<std::string> paths;
  for (json const& path : object.value("text", json::array())) {
    if (!path.is_string()) throw InputError("text must be a list of paths");
    paths.push_back(path.get<std::string>());
  }
  return paths;
}

TrainingState undescribe(json const& object) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  if (!object.is_object()) throw InputError("not a JSON object");
  json_integer(object, "format", kStateFormat, kStateFormat);
  TrainingState state;
  TrainingOptions& o = state.options;
  auto const model = object.find("model");
  if (model == object.end()) throw InputError("model is missing");
  o.model = config_from_json(*model);
  // Qwen3-MoE's config.json has one form for two routers that compute the same.
  o.model.router.kind = router_from_name(json_string(object, "router"));
  o.rounding = rounding_from_name(json_string(object, "round"));
  o.tile = static_cast<std::int32_t>(json_integer(object, "tile", 1, 1 << 20));
  o.steps = json_integer(object, "steps", 1, kMany);
  o.batch = json_integer(object, "batch", 1, kMany);
  o.warmup = json_integer(object, "warmup", 0, kMany);
  o.eval_every = json_integer(object, "eval_every", 1, kMany);
  o.rate = json_number(object, "learning_rate", 0, 1);
  o.balance = json_number(object, "balance", 0, 10);
  if (object.contains("z_loss")) o.z_loss = json_number(object, "z_loss", 0, 10);
  if (object.contains("bias_rate")) o.bias_rate = json_number(object, "bias_rate", 0, 1);
  o.seed = json_bits(object, "seed");
  validate(o);
  state.step = json_integer(object, "step", 0, o.steps);
  state.text.fingerprint = json_bits(object, "text_fingerprint");
  state.text.paths = text_paths(object);
  return state;
}

std::vector<float> read_sized(SafetensorsFile& file, char const* name, std::int64_t size) {
  std::vector<float> values = file.read_vector(name);
  if (static_cast<std::int64_t>(values.size()) != size) {
    throw InputError(
        fmt::format("tensor {} has {} values instead of {}", name, values.size(), size));
  }
  return values;
}

TrainingState read_state(SafetensorsFile& file) {
  auto const description = file.metadata().find(kStateKey);
  if (description == file.metadata().end()) {
    throw InputError(
        fmt::format("no {} in the metadata; was it written by tessera train?", kStateKey));
  }
  TrainingState state = undescribe(parse_json(description->second, kStateKey));
  TrainingOptions const& o = state.options;
  std::int64_t const size = parameter_count(o.model);
  std::int64_t const snapshots = state.step / History::kLoadEvery;
  state.parameters = read_sized(file, "parameters", size);
  state.moments.first = read_sized(file, "adamw.first", size);
  state.moments.second = read_sized(file, "adamw.second", size);
  state.history.loss = read_sized(file, "history.loss", state.step);
  state.history.balance = read_sized(file, "history.balance", state.step);
  state.history.held_out = read_sized(file, "history.held_out", state.step / o.eval_every);
  state.history.expert_load =
      read_sized(file, "history.expert_load", snapshots * o.model.layers * o.model.experts);
  return state;
}

}  // namespace

void save_model(fs::path const& folder, ModelConfig const& config,
                std::span<float const> parameters) {
  ParameterLayout const layout(config);
  std::vector<TensorData> tensors;
  for (NamedSlice const& slice : layout.slices()) {
    tensors.push_back({slice.name, slice.shape,
                       parameters.subspan(static_cast<std::size_t>(slice.offset),
                                          static_cast<std::size_t>(slice.size))});
  }
  write_safetensors(folder / kModelFile, {{"format", "pt"}}, tensors);
  write_atomically(folder / kConfigFile, to_json(config).dump(2) + "\n");
}

LoadedModel load_model(fs::path const& folder) {
  LoadedModel model;
  std::string const text = read_file(folder / kConfigFile, kMaxConfigBytes);
  try {
    model.config = parse_config(text);
  } catch (InputError const& error) {
    throw InputError(fmt::format("{}: {}", (folder / kConfigFile).string(), error.what()));
  }
  SafetensorsFile file(folder / kModelFile);
  if (auto const layout = file.metadata().find("tessera_layout"); layout != file.metadata().end()) {
    throw InputError(fmt::format(
        "{}: its experts are in layout {}; tessera convert --layout huggingface makes it readable",
        (folder / kModelFile).string(), printable(layout->second)));
  }
  for (TensorEntry const& tensor : file.tensors()) {
    if (tensor.dtype == "F32") continue;
    throw InputError(fmt::format("{}: tensor {} is {}; only F32 is read: save the model in float32",
                                 (folder / kModelFile).string(), printable(tensor.name, 120),
                                 tensor.dtype));
  }
  auto const tensors = static_cast<std::int64_t>(file.tensors().size());
  auto const parameters = static_cast<std::int64_t>(file.data_bytes() / sizeof(float));
  if (tensors != slice_count(model.config) || parameters != parameter_count(model.config)) {
    throw InputError(fmt::format("{}: {} tensors with {} fp32 values; {} asks for {} with {}",
                                 (folder / kModelFile).string(), tensors, parameters, kConfigFile,
                                 slice_count(model.config), parameter_count(model.config)));
  }
  ParameterLayout const layout(model.config);
  model.parameters.resize(static_cast<std::size_t>(layout.size()));
  for (NamedSlice const& slice : layout.slices()) {
    file.read(
        slice.name, slice.shape,
        std::span(model.parameters)
            .subspan(static_cast<std::size_t>(slice.offset), static_cast<std::size_t>(slice.size)));
  }
  return model;
}

void save_state(fs::path const& folder, TrainingState const& state) {
  std::vector<TensorData> tensors;
  auto const add = [&](char const* name, std::span<float const> values) {
    tensors.push_back({name, {static_cast<std::int64_t>(values.size())}, values});
  };
  add("parameters", state.parameters);
  add("adamw.first", state.moments.first);
  add("adamw.second", state.moments.second);
  add("history.loss", state.history.loss);
  add("history.balance", state.history.balance);
  add("history.held_out", state.history.held_out);
  add("history.expert_load", state.history.expert_load);
  std::string const description =
      describe(state).dump(-1, ' ', false, json::error_handler_t::replace);
  write_safetensors(folder / kStateFile, {{kStateKey, description}}, tensors);
}

TrainingState load_state(fs::path const& folder) {
  fs::path const path = folder / kStateFile;
  if (std::error_code error; !fs::exists(path, error)) {
    throw InputError(
        fmt::format("{}: no such file; --resume takes the folder of a run", path.string()));
  }
  SafetensorsFile file(path);
  try {
    return read_state(file);
  } catch (InputError const& error) {
    throw InputError(fmt::format("{}: {}", path.string(), error.what()));
  }
}

}  // namespace tessera::lm
