// SPDX-License-Identifier: Apache-2.0
// Values that are known in one CUDA context and asked again in the next: a caller may have several of one device, and
// each loads kernels of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "driver.hpp"

namespace tessera::cuda::host {

constexpr uint64_t kUnknownContext = UINT64_MAX;

// No other context of the process has the same number, not even one that is made later at the same address.
inline uint64_t current_context_id() noexcept {
  static auto* const get_id = driver_function<PFN_cuCtxGetId_v12000>("cuCtxGetId", 12000);
  unsigned long long id = 0;
  bool const known = get_id != nullptr && get_id(nullptr, &id) == CUDA_SUCCESS;
  return known ? id : kUnknownContext;  // none is current: the runtime has not been called yet
}

// A number from 1 to 65535 for each context; 0: forgotten, or never set. Threads share it.
class PerContext {
 public:
  int get(uint64_t id) const noexcept {
    uint64_t const slot = slot_of(id).load(std::memory_order_relaxed);
    return slot >> 16 == id ? int(slot & 0xffff) : 0;
  }
  void set(uint64_t id, int value) noexcept {
    if (id >> 48 == 0) slot_of(id).store(id << 16 | uint64_t(value), std::memory_order_relaxed);
  }

 private:
  // Contexts of one slot take it from each other.
  static constexpr size_t kSlots = 64;
  std::atomic<uint64_t>& slot_of(uint64_t id) noexcept { return slots_[id % kSlots]; }
  std::atomic<uint64_t> const& slot_of(uint64_t id) const noexcept { return slots_[id % kSlots]; }

  std::array<std::atomic<uint64_t>, kSlots> slots_{};
};

}  // namespace tessera::cuda::host
