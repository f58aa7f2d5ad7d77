// SPDX-License-Identifier: Apache-2.0
// f_e, the tokens that chose expert e, as balancing reads them: whole numbers, or means and shares of such. Shared by
// CPU and GPU, bit for bit.
#pragma once

#include <cstdint>

#include "core/simd.hpp"
#include "tessera/tensor.hpp"

namespace tessera::core {

/// sum f: of integers exact; of fp32 counts in fp64, in the order of load_sum_lane.
struct LoadSum {
  std::int64_t integer = 0;
  double real = 0;  ///< of integers too, rounded once
};

/// f [E] as int32, int64 or fp32. None is negative; integers add up to at most kMax, fp32 counts are finite.
struct LoadCounts {
  static constexpr std::int64_t kMax = std::int64_t{1} << 62;
  static constexpr std::int64_t kLanes = 32;

  void const* data = nullptr;
  DType dtype = DType::int32;
  std::int64_t experts = 0;

  [[nodiscard]] TESSERA_INLINE bool is_real() const noexcept { return dtype == DType::fp32; }
  /// An integer count.
  [[nodiscard]] TESSERA_INLINE std::int64_t at(std::int64_t e) const noexcept {
    return dtype == DType::int64 ? static_cast<std::int64_t const*>(data)[e]
                                 : static_cast<std::int32_t const*>(data)[e];
  }
  /// A count of any type.
  [[nodiscard]] TESSERA_INLINE double real_at(std::int64_t e) const noexcept {
    return is_real() ? static_cast<double>(static_cast<float const*>(data)[e])
                     : static_cast<double>(at(e));
  }
  /// True if an fp32 count is negative, infinite or NaN.
  [[nodiscard]] TESSERA_INLINE bool is_bad_real(std::int64_t e) const noexcept {
    constexpr double kLargest = 0x1.fffffep+127;
    return !(real_at(e) >= 0 && real_at(e) <= kLargest);
  }
  /// The first expert whose count is negative, not finite or takes the sum above kMax; E where none does.
  [[nodiscard]] TESSERA_INLINE std::int64_t first_bad() const noexcept {
    std::int64_t sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (is_real()) {
        if (is_bad_real(e)) return e;
        continue;
      }
      if (at(e) < 0 || at(e) > kMax - sum) return e;
      sum += at(e);
    }
    return experts;
  }
  /// The part of the sum of fp32 counts that lane `lane` of kLanes adds up; the lanes' parts are folded by halves, 16
  /// first. Counts of one magnitude, such as whole numbers over a divisor, add up without rounding.
  [[nodiscard]] TESSERA_INLINE double lane_sum(std::int64_t lane) const noexcept {
    double sum = 0;
    for (std::int64_t e = lane; e < experts; e += kLanes) sum += real_at(e);
    return sum;
  }
};

/// C_e = balance E f_e / (S sum f) of the load-balancing loss; 0 where the sum is 0.
TESSERA_INLINE float balance_cost(float balance, LoadCounts const& counts, std::int64_t e,
                                  LoadSum const& sum, std::int64_t scope_tokens) noexcept {
  if (sum.real == 0 || scope_tokens == 0) return 0.0f;
  double const share = counts.real_at(e) / (sum.real * static_cast<double>(scope_tokens));
  return static_cast<float>(static_cast<double>(balance) * static_cast<double>(counts.experts) *
                            share);
}

/// C_be of a sequence's loss, of `tokens` tokens whose experts are `sum` in all; 0 where there are none.
TESSERA_INLINE float sequence_cost(float balance, std::int64_t experts, std::int64_t count,
                                   std::int64_t sum, std::int64_t tokens,
                                   std::int64_t sequences) noexcept {
  if (sum == 0) return 0.0f;
  double const share =
      static_cast<double>(count) / (static_cast<double>(sum) * static_cast<double>(tokens));
  return static_cast<float>(static_cast<double>(balance) * static_cast<double>(experts) * share /
                            static_cast<double>(sequences));
}

/// z / S, or 0 without tokens.
TESSERA_INLINE float z_share(float z, std::int64_t scope_tokens) noexcept {
  return scope_tokens == 0
             ? 0.0f
             : static_cast<float>(static_cast<double>(z) / static_cast<double>(scope_tokens));
}

/// sign(mean(f) - f_e) = sign(sum f - E f_e), of integers exact; E f_e is exact for fp32 counts too.
TESSERA_INLINE int sign_below_mean(LoadCounts const& counts, std::int64_t e,
                                   LoadSum const& sum) noexcept {
  if (counts.is_real()) {
    double const scaled = static_cast<double>(counts.experts) * counts.real_at(e);
    return sum.real > scaled ? 1 : sum.real < scaled ? -1 : 0;
  }
  __extension__ using Wide = __int128;
  Wide const below = Wide{sum.integer} - Wide{counts.experts} * counts.at(e);
  return below > 0 ? 1 : below < 0 ? -1 : 0;
}

/// The mean of `signs`, a sum over all experts.
TESSERA_INLINE float mean_sign(std::int64_t signs, std::int64_t experts) noexcept {
  return static_cast<float>(static_cast<double>(signs) / static_cast<double>(experts));
}

}  // namespace tessera::core
