// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/transport/process_windows.hpp"

#include <algorithm>

namespace tessera::expert_parallel {

Status ProcessWindows::open(std::span<std::int32_t const> devices, std::size_t bytes) {
  if (devices.empty() || devices.size() > static_cast<std::size_t>(kMaxRanks)) {
    return Status::invalid("ranks=%zu: 1 to %d GPUs of one host", devices.size(), kMaxRanks);
  }
  if (bytes == 0) return Status::invalid("bytes=0: a window holds at least a byte");
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    auto const first = static_cast<std::size_t>(
        std::find(devices.begin(), devices.end(), devices[rank]) - devices.begin());
    if (first != rank) {
      return Status::invalid("ranks %zu and %zu are both on cuda:%d: a pass takes a whole GPU",
                             first, rank, devices[rank]);
    }
  }
  devices_.assign(devices.begin(), devices.end());
  window_.bytes = bytes;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) TESSERA_TRY(open_rank(rank));
  return {};
}

Status ProcessWindows::open_rank(std::size_t rank) noexcept {
  DeviceScope const scope(calls_, devices_[rank], ContextChoice::primary);
  TESSERA_TRY(scope.status());
  for (std::int32_t const peer : devices_) {
    if (peer != devices_[rank]) TESSERA_TRY(calls_.reach(devices_[rank], peer));
  }
  auto const memory = calls_.allocate(window_.bytes);
  if (!memory.ok()) return memory.status();
  window_.address[rank] = memory.value();
  return calls_.clear(memory.value(), window_.bytes);
}

ProcessWindows::~ProcessWindows() {
  // A context that has failed has nothing left to wait for.
  for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
    static_cast<void>(wait(static_cast<std::int32_t>(rank)));
  }
  for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
    if (window_.address[rank] == nullptr) continue;
    DeviceScope const scope(calls_, devices_[rank], ContextChoice::primary);
    if (scope.status().ok()) calls_.free(window_.address[rank]);
  }
}

Status ProcessWindows::wait(std::int32_t rank) const noexcept {
  return wait_for_kernels(calls_, devices_[static_cast<std::size_t>(rank)]);
}

}  // namespace tessera::expert_parallel
