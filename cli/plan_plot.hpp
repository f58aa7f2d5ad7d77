// SPDX-License-Identifier: Apache-2.0
// The picture of `tessera plan --plot`: memory against granularity, tile waste against tokens.
#pragma once

#include <string>

#include "tessera/shape.hpp"

namespace tessera::cli {

/// Writes FILE.svg and, beside it, the gnuplot script FILE.gp that holds its data. Throws CommandError for a
/// name that does not end in .svg, a file that cannot be written, and (exit 3) where gnuplot is missing.
void draw_plan(std::string const& file, MoeDesc const& desc);

/// The script alone: draws `picture`, a file name in the folder where gnuplot runs.
std::string plan_plot_script(std::string const& picture, MoeDesc const& desc);

}  // namespace tessera::cli
