// SPDX-License-Identifier: Apache-2.0
// The context of a GPU test.
#pragma once

#include "device_buffer.cuh"
#include "tessera/tessera.hpp"

namespace tessera::cuda_test {

// The exit status of body(context) on the first GPU; skipped where there is none, or none that the library runs on.
template <class Body>
int on_first_gpu(Body&& body) {
  if (!has_device()) return kSkipped;
  auto const context = Context::create({{DeviceKind::cuda, 0}});
  if (context.ok()) return body(context.value());
  std::printf("%s\n", context.status().text());
  return context.status().code() == StatusCode::environment ? kSkipped : 1;
}

}  // namespace tessera::cuda_test
