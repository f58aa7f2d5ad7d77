// SPDX-License-Identifier: Apache-2.0
#include "lm/json.hpp"

#include <fmt/format.h>

#include <unordered_set>
#include <vector>

#include "lm/error.hpp"

namespace tessera::lm {

using nlohmann::json;

namespace {

// Depth and keys, before anything is built: the parser's own callback takes quadratic time.
class Rules : public nlohmann::json_sax<json> {
 public:
  Rules(std::string_view what, int max_depth) : what_(what), max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, string_t const&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    throw InputError(
        fmt::format("{}: the key \"{}\" stands twice in one object", what_, printable(name)));
  }
  bool parse_error(std::size_t, std::string const&, json::exception const& error) override {
    throw InputError(fmt::format("{}: not valid JSON: {}", what_, printable(error.what(), 160)));
  }

 private:
  bool open() {
    keys_.emplace_back();
    if (static_cast<int>(keys_.size()) <= max_depth_) return true;
    throw InputError(fmt::format("{}: JSON nests deeper than {} levels", what_, max_depth_));
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::string_view what_;
  int max_depth_;
  std::vector<std::unordered_set<std::string>> keys_;  // of what is open; none of an array
};

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view what, int max_depth) {
  Rules rules(what, max_depth);
  json::sax_parse(text.begin(), text.end(), &rules);
  return json::parse(text.begin(), text.end());
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
