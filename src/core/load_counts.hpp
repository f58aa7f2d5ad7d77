// SPDX-License-Identifier: Apache-2.0
// f_e, the tokens that chose expert e, as balancing reads them. Shared by CPU and GPU, bit for bit.
#pragma once

#include <cstdint>

#include "core/simd.hpp"

namespace tessera::core {

/// f [E] as int32 or int64. None is negative, and they add up to at most kMost.
struct LoadCounts {
  static constexpr std::int64_t kMost = std::int64_t{1} << 62;

  void const* data = nullptr;
  bool is_int64 = false;
  std::int64_t experts = 0;

  [[nodiscard]] TESSERA_INLINE std::int64_t at(std::int64_t e) const noexcept {
    return is_int64 ? static_cast<std::int64_t const*>(data)[e]
                    : static_cast<std::int32_t const*>(data)[e];
  }
  /// The first expert whose count is negative or takes the sum above kMost; E where none does.
  [[nodiscard]] TESSERA_INLINE std::int64_t first_bad() const noexcept {
    std::int64_t sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (at(e) < 0 || at(e) > kMost - sum) return e;
      sum += at(e);
    }
    return experts;
  }
};

/// C_e = balance E f_e / (S sum f) of the load-balancing loss; 0 where the sum is 0.
TESSERA_INLINE float balance_cost(float balance, LoadCounts const& counts, std::int64_t e,
                                  std::int64_t sum, std::int64_t scope_tokens) noexcept {
  if (sum == 0) return 0.0f;
  double const share = static_cast<double>(counts.at(e)) /
                       (static_cast<double>(sum) * static_cast<double>(scope_tokens));
  return static_cast<float>(static_cast<double>(balance) * static_cast<double>(counts.experts) *
                            share);
}

/// sign(mean(f) - f_e) = sign(sum f - E f_e), exact.
TESSERA_INLINE int sign_below_mean(LoadCounts const& counts, std::int64_t e,
                                   std::int64_t sum) noexcept {
  __extension__ using Wide = __int128;
  Wide const below = Wide{sum} - Wide{counts.experts} * counts.at(e);
  return below > 0 ? 1 : below < 0 ? -1 : 0;
}

/// The mean of `signs`, a sum over all experts.
TESSERA_INLINE float mean_sign(std::int64_t signs, std::int64_t experts) noexcept {
  return static_cast<float>(static_cast<double>(signs) / static_cast<double>(experts));
}

}  // namespace tessera::core
