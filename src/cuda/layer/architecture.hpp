// SPDX-License-Identifier: Apache-2.0
// The GPUs that the kernels run on.
#pragma once

#include <cstdint>

#include "tessera/status.hpp"

namespace tessera::cuda {

/// The GEMMs of a GPU are written for one of these.
enum class Architecture : std::uint8_t { sm_90, sm_100 };
Architecture architecture_of(int major) noexcept;

/// Kernels that no GPU has run are refused, or taken by who asks for them.
enum class Unproven : bool { refused, taken };

/// Ok for compute capability 9.0, and for 10.0 where unproven kernels are taken; else environment, with the reason.
Status check_architecture(int device, char const* name, int major, int minor,
                          Unproven unproven = Unproven::refused) noexcept;

}  // namespace tessera::cuda
