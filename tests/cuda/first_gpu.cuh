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
  bool const lacks = context.status().code() == StatusCode::environment;
  std::printf("%s%s\n", lacks ? "skipped: " : "",
              context.status().text());  // the text has the remedy
  return lacks ? kSkipped : 1;
}

}  // namespace tessera::cuda_test
