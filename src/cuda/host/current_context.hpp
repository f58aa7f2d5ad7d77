// SPDX-License-Identifier: Apache-2.0
// The calling thread's current CUDA context for the length of a scope. By the driver alone: cudaSetDevice would put the
// primary context in the place of one that the caller made, remember the device for the thread, and make a context on
// GPU 0 when it puts back the device of a thread that never chose one.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>

#include "context_choice.hpp"
#include "driver.hpp"
#include "outside_capture.hpp"

namespace tessera::cuda::host {

/// Holds the driver's calls that answer questions about contexts.
struct ContextCalls {
  PFN_cuInit_v2000 init = driver_function<PFN_cuInit_v2000>("cuInit", 2000);
  PFN_cuDeviceGet_v2000 device_get = driver_function<PFN_cuDeviceGet_v2000>("cuDeviceGet", 2000);
  PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary =
      driver_function<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain", 7000);
  PFN_cuCtxGetCurrent_v4000 get_current =
      driver_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
  PFN_cuCtxSetCurrent_v4000 set_current =
      driver_function<PFN_cuCtxSetCurrent_v4000>("cuCtxSetCurrent", 4000);
  PFN_cuCtxGetDevice_v2000 get_device =
      driver_function<PFN_cuCtxGetDevice_v2000>("cuCtxGetDevice", 2000);

  cudaError_t const error = start();  ///< of looking them up and starting the driver

 private:
  // The driver's errors have the numbers of the runtime's.
  [[nodiscard]] cudaError_t start() const noexcept {
    bool const complete = init != nullptr && device_get != nullptr && retain_primary != nullptr &&
                          get_current != nullptr && set_current != nullptr && get_device != nullptr;
    return complete ? static_cast<cudaError_t>(init(0)) : cudaErrorNotSupported;
  }
};

inline ContextCalls const& context_calls() noexcept {
  static ContextCalls const calls;
  return calls;
}

/// The primary context of a device. Retained once and never released: it may be in use until the process ends.
inline cudaError_t primary_context(CUdevice device, CUcontext& context) noexcept {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<CUcontext>, kMaxDevices> retained{};
  static std::mutex mutex;
  if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
  std::atomic<CUcontext>& own = retained[static_cast<std::size_t>(device)];
  context = own.load(std::memory_order_acquire);
  if (context != nullptr) return cudaSuccess;
  OutsideCapture const outside;
  std::scoped_lock const lock(mutex);
  context = own.load(std::memory_order_relaxed);
  if (context != nullptr) return cudaSuccess;
  auto const error = static_cast<cudaError_t>(context_calls().retain_primary(&context, device));
  if (error == cudaSuccess) own.store(context, std::memory_order_release);
  return error;
}

/// Makes a context of `device` current. `before`: what was; null: none. Changes nothing where it fails.
inline cudaError_t make_current(int device, ContextChoice choice, CUcontext& before) noexcept {
  ContextCalls const& calls = context_calls();
  if (calls.error != cudaSuccess) return calls.error;
  CUdevice wanted = 0, current = 0;
  auto error = static_cast<cudaError_t>(calls.device_get(&wanted, device));
  if (error != cudaSuccess) return error;
  error = static_cast<cudaError_t>(calls.get_current(&before));
  if (error != cudaSuccess) return error;
  if (choice == ContextChoice::any_of_device && before != nullptr &&
      calls.get_device(&current) == CUDA_SUCCESS && current == wanted) {
    return cudaSuccess;
  }
  CUcontext primary = nullptr;
  error = primary_context(wanted, primary);
  return error == cudaSuccess ? static_cast<cudaError_t>(calls.set_current(primary)) : error;
}

/// Makes current what make_current() found, after it succeeded. Most often it still is.
inline void restore(CUcontext before) noexcept {
  CUcontext current = nullptr;
  if (context_calls().get_current(&current) == CUDA_SUCCESS && current == before) return;
  context_calls().set_current(before);
}

/// A context of `device`, current for the length of a scope.
class CurrentContext {
 public:
  CurrentContext(int device, ContextChoice choice) noexcept
      : error_(make_current(device, choice, before_)) {}
  ~CurrentContext() {
    if (error_ == cudaSuccess) restore(before_);
  }
  CurrentContext(CurrentContext const&) = delete;
  CurrentContext& operator=(CurrentContext const&) = delete;

  [[nodiscard]] cudaError_t error() const noexcept { return error_; }

 private:
  CUcontext before_ = nullptr;
  cudaError_t error_;
};

}  // namespace tessera::cuda::host
