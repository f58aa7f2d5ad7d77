// SPDX-License-Identifier: Apache-2.0
// Memory as a hostile caller would give it: each tensor allocated apart and to the byte, filled with NaN, between
// canaries, aligned to its elements and no more; filled with NaN again before it is freed. On a GPU it is managed
// memory, which the host prepares and reads while no work runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "tessera/tensor.hpp"

namespace tessera::verify {

/// Says what a buffer's address is a multiple of: 8 and no more, or a cache line.
enum class Alignment { element, cache_line };

class GuardedBuffer {
 public:
  /// `bytes` bytes of the 32-bit pattern `poison`.
  GuardedBuffer(std::size_t bytes, std::uint32_t poison, Alignment alignment, Device device);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer const&) = delete;
  GuardedBuffer& operator=(GuardedBuffer const&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// From now on the content counts as read-only.
  void seal() noexcept;
  /// Canaries, and the content where sealed, are what they were.
  [[nodiscard]] bool intact() const noexcept;

 private:
  [[nodiscard]] std::uint64_t checksum() const noexcept;
  void fill(std::uint32_t word) noexcept;
  std::size_t bytes_;
  std::uint32_t poison_;
  std::unique_ptr<std::byte[]> host_memory_;  ///< one of the two
  device::Memory device_memory_;
  std::byte* memory_ = nullptr;
  std::byte* data_ = nullptr;
  bool sealed_ = false;
  std::uint64_t checksum_ = 0;
};

/// The buffers of one phase of a call.
class Memory {
 public:
  explicit Memory(std::uint32_t poison, Alignment alignment = Alignment::element,
                  Device device = {})
      : poison_(poison), alignment_(alignment), device_(device) {}

  Tensor output(DType dtype, std::vector<std::int64_t> const& shape);
  /// Values already rounded to `dtype`; read-only.
  ConstTensor input(DType dtype, std::vector<std::int64_t> const& shape,
                    std::span<float const> values);
  ConstTensor input_ids(DType dtype, std::vector<std::int64_t> const& shape,
                        std::span<std::int64_t const> values);
  ConstTensor input_mask(std::span<std::uint8_t const> values);
  Buffer buffer(std::size_t bytes);
  /// Makes what was allocated last read-only.
  void seal_last() noexcept { buffers_.back().seal(); }

  [[nodiscard]] bool intact() const noexcept;
  [[nodiscard]] std::size_t bytes() const noexcept;

 private:
  std::uint32_t poison_;
  Alignment alignment_;
  Device device_;
  std::deque<GuardedBuffer> buffers_;
};

/// Bit patterns that are NaN as fp32 and in every other 16-bit half.
inline constexpr std::uint32_t kPoisons[] = {0xffffffffu, 0x7fc1ffa5u};

}  // namespace tessera::verify
