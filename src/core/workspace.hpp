// SPDX-License-Identifier: Apache-2.0
// Plans the regions of a workspace: the query and the call walk the same plan, so they cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::core {

/// One planned array of T; `in(base)` is its address in a workspace.
template <class T>
struct Region {
  std::size_t offset = 0;
  [[nodiscard]] T* in(std::byte* base) const noexcept {
    return reinterpret_cast<T*>(base + offset);
  }
};

/// An array whose element type is known only when it runs: the storage type of a layer.
struct StorageRegion {
  std::size_t offset = 0;
  template <class T>
  [[nodiscard]] T* in(std::byte* base) const noexcept {
    return Region<T>{offset}.in(base);
  }
};

class WorkspacePlan {
 public:
  /// Two lines of a GPU's L2, so that a tile's rows of 128 bytes are lines: regions 64 bytes apart
  /// cost forward 2 to 8% and backward 1 to 5% (docs/notebook/2026-11-24-aligned-regions.md).
  static constexpr std::size_t kAlignment = 256;

  template <class T>
  Region<T> add(std::int64_t count) noexcept {
    Region<T> const region{bytes_};
    auto const size = static_cast<std::size_t>(count) * sizeof(T);
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return region;
  }

  StorageRegion add_storage(std::int64_t count, std::size_t element_bytes) noexcept {
    return {add<std::byte>(count * static_cast<std::int64_t>(element_bytes)).offset};
  }

  /// Includes what aligning a workspace of any address may take.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_ == 0 ? 0 : bytes_ + kAlignment; }

  [[nodiscard]] static std::byte* align(void* workspace) noexcept {
    auto const address = reinterpret_cast<std::uintptr_t>(workspace);
    return reinterpret_cast<std::byte*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  std::size_t bytes_ = 0;
};

}  // namespace tessera::core
