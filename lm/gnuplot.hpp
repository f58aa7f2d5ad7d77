// SPDX-License-Identifier: Apache-2.0
// Pictures by gnuplot, a program of its own.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::lm {

/// Runs `gnuplot script` in `folder`, where the script draws `picture`. Returns "", or why there is no picture.
std::string draw_with_gnuplot(std::filesystem::path const& folder, std::string const& script,
                              std::string const& picture);

}  // namespace tessera::lm
