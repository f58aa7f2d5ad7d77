// SPDX-License-Identifier: Apache-2.0
// Kernels and the ops that they are parts of.
#pragma once

#include <string>

namespace tessera::cli {

/// "void tessera::cuda::aggregate<...>(...)" -> "aggregate"; the parts of metadata are one op, and so are a kernel and
/// its plain twin.
std::string op_of_kernel(std::string const& kernel);

}  // namespace tessera::cli
