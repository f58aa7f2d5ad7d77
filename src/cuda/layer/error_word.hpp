// SPDX-License-Identifier: Apache-2.0
// The error word states which rule a device value broke, where, and the value, in 64 bits that one store writes.
// 0: nothing is wrong. Of several bad values one is reported.
#pragma once

#include <cstdint>

namespace tessera::cuda {

enum class BadValue : std::uint32_t {
  none = 0,
  expert_offsets = 1,
  token_offsets = 2,
  topk_counts = 3,
  sequence_offsets = 4
};

/// rule: bits 61-63; index < 2^30: bits 31-60; value + 1 within [0, 2^31): bits 0-30.
struct ErrorWord {
  BadValue rule;
  std::int64_t index;  ///< 2^30 - 1 stands for anything above, too
  std::int64_t value;  ///< -1 stands for anything below 0, 2^31 - 2 for anything above

#if defined(__CUDACC__)
  __host__ __device__
#endif
      [[nodiscard]] constexpr std::uint64_t
      packed() const {
    constexpr std::int64_t kLargest = 0x7ffffffe, kLastIndex = 0x3fffffff;
    std::int64_t const place = index > kLastIndex ? kLastIndex : index;
    std::int64_t const bounded = value < -1 ? -1 : value > kLargest ? kLargest : value;
    return static_cast<std::uint64_t>(rule) << 61 | static_cast<std::uint64_t>(place) << 31 |
           static_cast<std::uint64_t>(bounded + 1);
  }
  static constexpr ErrorWord unpacked(std::uint64_t word) {
    return {static_cast<BadValue>(word >> 61), static_cast<std::int64_t>(word >> 31 & 0x3fffffffu),
            static_cast<std::int64_t>(word & 0x7fffffffu) - 1};
  }
};

}  // namespace tessera::cuda
