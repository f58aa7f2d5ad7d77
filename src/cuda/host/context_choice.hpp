// SPDX-License-Identifier: Apache-2.0
// The choice of the CUDA context of a device that work goes to.
#pragma once

#include <cstdint>

namespace tessera::cuda::host {

enum class ContextChoice : std::uint8_t {
  any_of_device,  ///< for calls: that of the thread if it is the device's, where the caller's memory and stream are
  primary,  ///< for what outlives a call: the caller may destroy contexts of its own
};

}  // namespace tessera::cuda::host
