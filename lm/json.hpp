// SPDX-License-Identifier: Apache-2.0
// JSON from files that nobody vouches for: bounded depth, no repeated keys, one-line errors.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera::lm {

/// Parses `text`. Throws InputError "<what>: ..." if it is not JSON, nests deeper than `max_depth` or
/// repeats a key within an object.
nlohmann::json parse_json(std::string_view text, std::string_view what, int max_depth = 8);

/// object[key] as an integer within [low, high]; InputError otherwise.
std::int64_t json_integer(nlohmann::json const& object, char const* key, std::int64_t low,
                          std::int64_t high);
/// object[key] as a finite number within [low, high]; InputError otherwise.
double json_number(nlohmann::json const& object, char const* key, double low, double high);
/// object[key] as a string; InputError otherwise.
std::string json_string(nlohmann::json const& object, char const* key);

/// `text` on one line of at most `length` characters, anything unprintable replaced: fit for a message.
std::string printable(std::string_view text, std::size_t length = 80);

}  // namespace tessera::lm
