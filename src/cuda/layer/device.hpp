// SPDX-License-Identifier: Apache-2.0
// The calling thread's current CUDA context for the length of a call.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/current_context.hpp"
#include "tessera/status.hpp"

namespace tessera::cuda {

using host::ContextChoice;

/// Text of a failed CUDA call, as a device_error. Leaves nothing behind for the caller's own calls.
inline Status device_error(char const* what, cudaError_t error) noexcept {
  cudaGetLastError();
  return Status::error(StatusCode::device_error, "%s: %s", what, cudaGetErrorString(error));
}

/// Makes a context of `device` current and puts the caller's back. An error that the thread has not read is forgotten:
/// it would be taken for that of a launch.
class DeviceGuard {
 public:
  DeviceGuard(int device, ContextChoice choice) noexcept : current_(device, choice) {
    cudaGetLastError();
  }

  [[nodiscard]] Status status() const noexcept {
    cudaError_t const error = current_.error();
    return error == cudaSuccess ? Status() : device_error("current context", error);
  }

 private:
  host::CurrentContext current_;
};

}  // namespace tessera::cuda
