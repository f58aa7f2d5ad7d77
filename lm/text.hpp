// SPDX-License-Identifier: Apache-2.0
// Pieces of messages.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace tessera::lm {

/// The values, `separator` between them. (fmt::join of fmt 9 does not compile without warnings on gcc 12.)
template <class Range>
std::string joined(Range const& values, std::string_view separator) {
  std::string text;
  for (auto const& value : values) {
    if (!text.empty()) text += separator;
    text += fmt::format("{}", value);
  }
  return text;
}

}  // namespace tessera::lm
