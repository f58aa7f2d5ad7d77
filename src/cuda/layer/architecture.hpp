// SPDX-License-Identifier: Apache-2.0
// The GPUs that the kernels run on.
#pragma once

#include "tessera/status.hpp"

namespace tessera::cuda {

/// Ok for compute capability 9.0; else environment, with the reason.
Status check_architecture(int device, char const* name, int major, int minor) noexcept;

}  // namespace tessera::cuda
