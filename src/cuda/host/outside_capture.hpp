// SPDX-License-Identifier: Apache-2.0
// First calls inside a stream capture. While a graph is captured the driver refuses what it takes for unsafe, such as
// pinned memory and contexts, and gives the capture up. What a first call asks for once belongs to no stream.
#pragma once

#include "driver.hpp"

namespace tessera::cuda::host {

/// For the length of a scope the thread may do what is refused while it, or another thread, captures a stream.
class OutsideCapture {
 public:
  OutsideCapture() noexcept { swap(); }
  ~OutsideCapture() { swap(); }
  OutsideCapture(OutsideCapture const&) = delete;
  OutsideCapture& operator=(OutsideCapture const&) = delete;

 private:
  // The thread's mode and mode_ change places. A driver without the function captures as before.
  void swap() noexcept {
    static auto* const exchange = driver_function<PFN_cuThreadExchangeStreamCaptureMode_v10010>(
        "cuThreadExchangeStreamCaptureMode", 10010);
    if (exchange != nullptr) exchange(&mode_);
  }

  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace tessera::cuda::host
