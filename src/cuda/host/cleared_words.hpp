// SPDX-License-Identifier: Apache-2.0
// Tile counters, and words between two kernels, lie in the caller's workspace, which holds anything. The last kernel
// that makes the tables clears them: every kernel that reads one comes behind it, and none before it does. Run alone,
// in any order, a kernel finds its tile counter at 0, as all leave it. Only down_projection_fwd needs an
// up_projection_fwd since the words were cleared: it would wait for what nobody hands over.
#pragma once

#include <cstdint>

namespace tessera::cuda {

struct ClearedWords {
  int32_t* gmem = nullptr;
  int32_t count = 0;
};

}  // namespace tessera::cuda
