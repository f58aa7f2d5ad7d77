// SPDX-License-Identifier: Apache-2.0
// The calling thread's current CUDA context for the length of a call.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/current_context.hpp"
#include "cuda/host/error_text.hpp"

namespace tessera::cuda {

using host::ContextChoice;
using host::device_error;

/// Makes a context of `device` current and puts the caller's back. An error that the thread has not read is forgotten:
/// it would be taken for that of a launch.
class DeviceGuard {
 public:
  DeviceGuard(int device, ContextChoice choice) noexcept : current_(device, choice) {
    cudaGetLastError();
  }

  [[nodiscard]] Status status() const noexcept {
    return host::check(current_.error(), "current context");
  }

 private:
  host::CurrentContext current_;
};

}  // namespace tessera::cuda
