// SPDX-License-Identifier: Apache-2.0
#include "cli/routing_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{1} << 28;

/// Counts nesting before a document is built, so that a hostile depth costs nothing.
void check_depth(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char const c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > 3) throw CommandError("routing file: nested deeper than an array of arrays");
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

nlohmann::json const& array_of(nlohmann::json const& document, char const* key) {
  auto const place = document.find(key);
  if (place == document.end() || !place->is_array()) {
    throw CommandError(
        fmt::format("routing file: \"{}\" must be an array with a row per token", key));
  }
  return *place;
}

std::int64_t read_id(nlohmann::json const& value, std::size_t token) {
  if (!value.is_number_integer()) {
    throw CommandError(
        fmt::format("routing file: topk_ids[{}] holds something other than integers", token));
  }
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(kMax)) {
    return -1;  // outside [0, E) in any case: a sentinel
  }
  auto const id = value.get<std::int64_t>();
  return id < -kMax ? -1 : id;
}

float read_weight(nlohmann::json const& value, std::size_t token) {
  auto const bad = [&] {
    return CommandError(fmt::format(
        "routing file: topk_weights[{}] holds something other than fp32 numbers", token));
  };
  if (!value.is_number()) throw bad();
  auto const weight = value.get<double>();
  if (!(std::abs(weight) <= std::numeric_limits<float>::max())) throw bad();
  return static_cast<float>(weight);
}

}  // namespace

RoutingTable parse_routing(std::string_view text) {
  check_depth(text);
  nlohmann::json document;
  try {
    document = nlohmann::json::parse(text.begin(), text.end());
  } catch (nlohmann::json::parse_error const& error) {
    throw CommandError(fmt::format("routing file: not JSON at byte {}", error.byte));
  } catch (nlohmann::json::exception const&) {
    throw CommandError("routing file: holds a number that no double can hold");
  }
  if (!document.is_object()) throw CommandError("routing file: must be an object");
  auto const& ids = array_of(document, "topk_ids");
  auto const& weights = array_of(document, "topk_weights");
  if (ids.size() != weights.size()) {
    throw CommandError(fmt::format("routing file: {} rows of topk_ids, {} of topk_weights",
                                   ids.size(), weights.size()));
  }
  RoutingTable table;
  table.tokens = static_cast<std::int64_t>(ids.size());
  table.token_offsets.push_back(0);
  for (std::size_t t = 0; t < ids.size(); ++t) {
    if (!ids[t].is_array() || !weights[t].is_array() || ids[t].size() != weights[t].size()) {
      throw CommandError(fmt::format(
          "routing file: row {}: topk_ids and topk_weights must be arrays of equal length", t));
    }
    for (auto const& id : ids[t]) table.topk_ids.push_back(read_id(id, t));
    for (auto const& weight : weights[t]) table.topk_weights.push_back(read_weight(weight, t));
    table.token_offsets.push_back(static_cast<std::int64_t>(table.topk_ids.size()));
    auto const length = static_cast<std::int64_t>(ids[t].size());
    table.variable_experts |= length != static_cast<std::int64_t>(ids[0].size()) || length == 0;
    table.top_k = std::max(table.top_k, length);
  }
  return table;
}

RoutingTable read_routing_file(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw CommandError(fmt::format("--routing file:{}: cannot be opened", path));
  std::string text;
  std::vector<char> block(1 << 16);
  while (file.read(block.data(), std::ssize(block)), file.gcount() > 0) {
    text.append(block.data(), static_cast<std::size_t>(file.gcount()));
    if (text.size() > kMaxBytes) {
      throw CommandError(
          fmt::format("--routing file:{}: larger than {} MiB", path, kMaxBytes >> 20));
    }
  }
  if (file.bad()) throw CommandError(fmt::format("--routing file:{}: cannot be read", path));
  return parse_routing(text);
}

}  // namespace tessera::cli
