// SPDX-License-Identifier: Apache-2.0
// Quotients by a number that is known before a kernel begins: one multiplication, where a division of the GPU is some
// thirty instructions, most of them one after the other.
#pragma once

#include <cstdint>

#include "core/simd.hpp"

namespace tessera::expert_parallel {

/// Exact where dividend * divisor <= 2^32: with m = ceil(2^32 / d), m * n / 2^32 exceeds n / d by less than
/// n / 2^32, and a quotient's fraction is 1 - 1/d at most.
class Divisor {
 public:
  constexpr explicit Divisor(std::int32_t divisor)
      : reciprocal_(((std::uint64_t{1} << 32) + static_cast<std::uint32_t>(divisor) - 1) /
                    static_cast<std::uint32_t>(divisor)) {}

  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t quotient(std::uint32_t dividend) const {
    return static_cast<std::int32_t>(dividend * reciprocal_ >> 32);
  }

 private:
  std::uint64_t reciprocal_;
};

}  // namespace tessera::expert_parallel
