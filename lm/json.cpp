// SPDX-License-Identifier: Apache-2.0
#include "lm/json.hpp"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "lm/error.hpp"

namespace tessera::lm {

using nlohmann::json;

nlohmann::json parse_json(std::string_view text, std::string_view what, int max_depth) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  auto const watch = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if (depth > max_depth) {
      throw InputError(fmt::format("{}: JSON nests deeper than {} levels", what, max_depth));
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get_ref<std::string const&>()).second) {
      throw InputError(fmt::format("{}: the key \"{}\" stands twice in one object", what,
                                   printable(parsed.get_ref<std::string const&>())));
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (json::exception const& error) {
    throw InputError(fmt::format("{}: not valid JSON: {}", what, printable(error.what(), 160)));
  }
}

namespace {

json const& member(json const& object, char const* key) {
  auto const found = object.is_object() ? object.find(key) : object.end();
  if (found == object.end()) throw InputError(fmt::format("{} is missing", key));
  return *found;
}

std::string shown(json const& value) {
  return printable(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace

std::int64_t json_integer(json const& object, char const* key, std::int64_t low,
                          std::int64_t high) {
  json const& value = member(object, key);
  bool const fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() &&
                      value.get<std::uint64_t>() > static_cast<std::uint64_t>(high)) &&
                    value.get<std::int64_t>() >= low && value.get<std::int64_t>() <= high;
  if (!fits) {
    throw InputError(
        fmt::format("{} = {}: must be an integer in [{}, {}]", key, shown(value), low, high));
  }
  return value.get<std::int64_t>();
}

double json_number(json const& object, char const* key, double low, double high) {
  json const& value = member(object, key);
  if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) {
    throw InputError(
        fmt::format("{} = {}: must be a number in [{}, {}]", key, shown(value), low, high));
  }
  return value.get<double>();
}

std::string json_string(json const& object, char const* key) {
  json const& value = member(object, key);
  if (!value.is_string()) {
    throw InputError(fmt::format("{} = {}: must be a string", key, shown(value)));
  }
  return value.get<std::string>();
}

std::string printable(std::string_view text, std::size_t length) {
  std::string line;
  for (char const c : text.substr(0, length)) line += c >= ' ' && c <= '~' ? c : '?';
  if (text.size() > length) line += "...";
  return line;
}

}  // namespace tessera::lm
