// SPDX-License-Identifier: Apache-2.0
// The calling thread's current device for the length of a call.
#pragma once

#include <cuda_runtime_api.h>

#include "tessera/status.hpp"

namespace tessera::cuda {

/// Text of a failed CUDA call, as a device_error.
inline Status device_error(char const* what, cudaError_t error) noexcept {
  return Status::error(StatusCode::device_error, "%s: %s", what, cudaGetErrorString(error));
}

/// Makes `device` current and puts the caller's back. An error that the thread has not read is forgotten: it would be
/// taken for that of a launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) noexcept {
    cudaGetLastError();
    error_ = cudaGetDevice(&previous_);
    if (error_ != cudaSuccess) return;
    // Where it is current already, too: a thread of device 0 may have no context, which encoding a tensor map needs.
    error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess && previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

  [[nodiscard]] Status status() const noexcept {
    return error_ == cudaSuccess ? Status() : device_error("current device", error_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace tessera::cuda
