// SPDX-License-Identifier: Apache-2.0
// A clock that only moves forward.
#pragma once

#include <chrono>

namespace tessera::cli {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tessera::cli
