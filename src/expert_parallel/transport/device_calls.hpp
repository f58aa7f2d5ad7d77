// SPDX-License-Identifier: Apache-2.0
// The few calls of the CUDA runtime that setting windows up needs, as a table: builds without CUDA have
// one that refuses, tests one of their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/host/context_choice.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel {

using cuda::host::ContextChoice;

struct DeviceCalls {
  /// Makes a context of `device` the thread's current one and returns the one before, null if there was none.
  /// environment: no such device.
  Expected<void*> (*use)(std::int32_t device, ContextChoice choice) noexcept = nullptr;
  /// Makes current what use() returned.
  void (*restore)(void* context) noexcept = nullptr;
  /// `bytes` zeros, there on return.
  Status (*clear)(void* device_memory, std::size_t bytes) noexcept = nullptr;
  /// Until nothing that was enqueued in the current context is left.
  Status (*synchronize)() noexcept = nullptr;
  /// To host memory, there on return.
  Status (*read)(void* host, void const* device_memory, std::size_t bytes) noexcept = nullptr;
  /// True if kernels of the current context can address it.
  bool (*is_device_memory)(void const* pointer) noexcept = nullptr;
  /// Memory of the current context's device.
  Expected<void*> (*allocate)(std::size_t bytes) noexcept = nullptr;
  void (*free)(void* device_memory) noexcept = nullptr;
  /// Lets kernels of the current context, of `device`, address what the primary context of `peer` allocates.
  /// environment: they cannot.
  Status (*reach)(std::int32_t device, std::int32_t peer) noexcept = nullptr;
};

/// Those of this build.
DeviceCalls const& device_calls() noexcept;

/// A context of a device for the length of a scope.
class DeviceScope {
 public:
  DeviceScope(DeviceCalls const& calls, std::int32_t device, ContextChoice choice) noexcept
      : calls_(calls) {
    auto const before = calls.use(device, choice);
    status_ = before.status();
    if (before.ok()) before_ = before.value();
  }
  DeviceScope(DeviceScope const&) = delete;
  DeviceScope& operator=(DeviceScope const&) = delete;
  ~DeviceScope() {
    if (status_.ok()) calls_.restore(before_);
  }
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  DeviceCalls const& calls_;
  Status status_;
  void* before_ = nullptr;
};

/// Until nothing is left that was enqueued on the device: in its primary context and, where that is another one, in the
/// caller's, whose streams passes run on.
inline Status wait_for_kernels(DeviceCalls const& calls, std::int32_t device) noexcept {
  Status status;
  for (ContextChoice const choice : {ContextChoice::any_of_device, ContextChoice::primary}) {
    DeviceScope const scope(calls, device, choice);
    Status const waited = scope.status().ok() ? calls.synchronize() : scope.status();
    if (status.ok()) status = waited;
  }
  return status;
}

}  // namespace tessera::expert_parallel
