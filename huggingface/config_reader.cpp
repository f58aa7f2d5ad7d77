// SPDX-License-Identifier: Apache-2.0
#include "huggingface/config_reader.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "lm/error.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface {

using nlohmann::json;

namespace {

constexpr std::int64_t kLargest = 1 << 24;  // of any size that a model has

std::string shown(json const& value) {
  return lm::printable(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace

ConfigReader::ConfigReader(json const& config) : config_(config) {
  if (!config.is_object()) throw lm::InputError("not a JSON object");
  model_type_ = lm::json_string(config, "model_type");
}

void ConfigReader::fail(std::string const& text) const {
  throw lm::InputError(fmt::format("{}: {}", lm::printable(model_type_), text));
}

bool ConfigReader::has(char const* key) const {
  auto const found = config_.find(key);
  return found != config_.end() && !found->is_null();
}

json const& ConfigReader::member(char const* key) const {
  if (!has(key)) {
    fail(fmt::format("{} is missing; take config.json as the model's authors published it", key));
  }
  return config_.at(key);
}

std::int64_t ConfigReader::integer(char const* key, std::int64_t least) const {
  json const& value = member(key);
  bool const fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kLargest}) &&
      value.get<std::int64_t>() >= least;
  if (!fits) {
    fail(
        fmt::format("{} = {}: must be an integer in [{}, {}]", key, shown(value), least, kLargest));
  }
  return value.get<std::int64_t>();
}

std::int64_t ConfigReader::size(char const* key) const { return integer(key, 1); }

std::int64_t ConfigReader::size_or(char const* key, std::int64_t otherwise) const {
  return has(key) ? integer(key, 1) : otherwise;
}

std::int64_t ConfigReader::count_or(char const* key, std::int64_t otherwise) const {
  return has(key) ? integer(key, 0) : otherwise;
}

std::int64_t ConfigReader::size_of_all(char const* key) const {
  json const& value = member(key);
  if (!value.is_array()) return size(key);
  bool const equal =
      !value.empty() && std::all_of(value.begin(), value.end(),
                                    [&](json const& one) { return one == value.front(); });
  if (!equal) fail(fmt::format("{} = {}: must be one number for all layers", key, shown(value)));
  json const single = {{"model_type", model_type_}, {key, value.front()}};
  return ConfigReader(single).size(key);
}

bool ConfigReader::flag(char const* key) const {
  json const& value = member(key);
  if (!value.is_boolean()) fail(fmt::format("{} = {}: must be true or false", key, shown(value)));
  return value.get<bool>();
}

bool ConfigReader::flag_or(char const* key, bool otherwise) const {
  return has(key) ? flag(key) : otherwise;
}

double ConfigReader::number(char const* key) const {
  json const& value = member(key);
  if (!value.is_number()) fail(fmt::format("{} = {}: must be a number", key, shown(value)));
  return value.get<double>();
}

double ConfigReader::number_or(char const* key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}

std::string ConfigReader::text(char const* key) const {
  json const& value = member(key);
  if (!value.is_string()) fail(fmt::format("{} = {}: must be a string", key, shown(value)));
  return value.get<std::string>();
}

std::vector<std::int64_t> ConfigReader::layer_list(char const* key, std::int64_t layers) const {
  std::vector<std::int64_t> list;
  if (!has(key)) return list;
  json const& value = member(key);
  if (!value.is_array()) fail(fmt::format("{} = {}: must be a list", key, shown(value)));
  for (json const& layer : value) {
    bool const fits = layer.is_number_integer() && layer >= 0 &&
                      layer.get<std::uint64_t>() < static_cast<std::uint64_t>(layers);
    if (!fits) {
      fail(fmt::format("{} names layer {}: num_hidden_layers = {} has layers 0 to {}", key,
                       shown(layer), layers, layers - 1));
    }
    list.push_back(layer.get<std::int64_t>());
  }
  return list;
}

std::optional<std::vector<std::string>> ConfigReader::layer_names(
    char const* key, std::int64_t layers, std::vector<std::string> const& known) const {
  if (!has(key)) return std::nullopt;
  json const& value = member(key);
  if (!value.is_array() || value.size() != static_cast<std::size_t>(layers)) {
    fail(fmt::format("{} has {} entries, num_hidden_layers = {}: one for each layer", key,
                     value.is_array() ? std::to_string(value.size()) : "no", layers));
  }
  std::vector<std::string> names;
  for (json const& name : value) {
    if (!name.is_string() ||
        std::find(known.begin(), known.end(), name.get_ref<std::string const&>()) == known.end()) {
      fail(fmt::format("{} names {}: known are {}", key, shown(name), lm::joined(known, ", ")));
    }
    names.push_back(name.get<std::string>());
  }
  return names;
}

std::int64_t ConfigReader::size_of_either(char const* key, char const* other) const {
  if (has(key) && has(other) && size(key) != size(other)) {
    fail(fmt::format("{} = {} contradicts {} = {}: two names for one number", key, size(key), other,
                     size(other)));
  }
  return has(other) ? size(other) : size(key);
}

void ConfigReader::require(char const* key, json const& wanted) const {
  if (!has(key) || config_.at(key) == wanted) return;
  fail(fmt::format("{} = {}: only {} is understood", key, shown(config_.at(key)), wanted.dump()));
}

}  // namespace tessera::huggingface
