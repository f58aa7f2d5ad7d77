// SPDX-License-Identifier: Apache-2.0
// The few calls of the CUDA runtime that setting windows up needs, as a table: builds without CUDA have
// one that refuses, tests one of their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/status.hpp"

namespace tessera::dist {

struct DeviceCalls {
  /// Makes `device` the thread's current one and returns the one before. environment: no such device.
  Expected<std::int32_t> (*use)(std::int32_t device) noexcept = nullptr;
  /// `bytes` zeros, there on return.
  Status (*clear)(void* device_memory, std::size_t bytes) noexcept = nullptr;
  /// Until nothing that was enqueued on the current device is left.
  Status (*synchronize)() noexcept = nullptr;
  /// To host memory, there on return.
  Status (*read)(void* host, void const* device_memory, std::size_t bytes) noexcept = nullptr;
  /// Whether kernels of the current device can address it.
  bool (*is_device_memory)(void const* pointer) noexcept = nullptr;
};

/// Those of this build.
DeviceCalls const& device_calls() noexcept;

/// A device for the length of a scope.
class DeviceScope {
 public:
  DeviceScope(DeviceCalls const& calls, std::int32_t device) noexcept : calls_(calls) {
    auto before = calls.use(device);
    status_ = before.status();
    if (before.ok()) before_ = before.value();
  }
  DeviceScope(DeviceScope const&) = delete;
  DeviceScope& operator=(DeviceScope const&) = delete;
  ~DeviceScope() {
    if (status_.ok()) static_cast<void>(calls_.use(before_).ok());
  }
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  DeviceCalls const& calls_;
  Status status_;
  std::int32_t before_ = 0;
};

}  // namespace tessera::dist
