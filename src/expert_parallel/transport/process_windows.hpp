// SPDX-License-Identifier: Apache-2.0
// Windows of ranks that are threads of one process, without NCCL: memory of each rank's GPU, which all of them address
// alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "expert_parallel/transport/device_calls.hpp"
#include "expert_parallel/transport/engine.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel {

class ProcessWindows {
 public:
  explicit ProcessWindows(DeviceCalls const& calls = device_calls()) noexcept : calls_(calls) {}
  ProcessWindows(ProcessWindows const&) = delete;
  ProcessWindows& operator=(ProcessWindows const&) = delete;
  /// Frees the memory, after all work of all these GPUs.
  ~ProcessWindows();

  /// Once. Rank r is on devices[r]; each has `bytes` zeros then. What has been allocated before an error is freed with
  /// the object. invalid_argument, environment: no such device, or one that does not address another; device_error.
  Status open(std::span<std::int32_t const> devices, std::size_t bytes);

  /// That of all ranks, whichever asks.
  [[nodiscard]] Window const& window() const noexcept { return window_; }
  /// Until nothing is left of what the rank's GPU was given.
  [[nodiscard]] Status wait(std::int32_t rank) const noexcept;

 private:
  Status open_rank(std::size_t rank) noexcept;

  DeviceCalls calls_;
  std::vector<std::int32_t> devices_;  // [rank]
  Window window_;
};

}  // namespace tessera::expert_parallel
