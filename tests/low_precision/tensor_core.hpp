// SPDX-License-Identifier: Apache-2.0
// Sums as an e4m3 wgmma of Hopper makes them, after a published model that is exact to the bit on an H100: of 32
// products and the accumulator each is shifted to the largest exponent among them and cut, toward zero, to 13
// fraction bits; so is the sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/reference/quantise.hpp"

namespace tessera::low_precision_tests {

inline constexpr int kFractionBits = 13;
inline constexpr std::int64_t kProducts = 32;  ///< of one instruction
inline constexpr std::int64_t kPromotion =
    128;  ///< products after which a partial sum goes to fp32

/// `value` cut to a multiple of `step`, toward zero.
inline double cut(double value, double step) { return std::trunc(value / step) * step; }

/// 2^-13 of the power of two below `magnitude`.
inline double step_of(double magnitude) {
  return magnitude == 0 ? 1 : std::ldexp(1.0, std::ilogb(magnitude) - kFractionBits);
}

/// accumulator + sum of a[i] b[i] over 32 e4m3 values.
inline double accumulate(double accumulator, double const* a, double const* b) {
  double products[kProducts], largest = std::abs(accumulator);
  for (std::int64_t i = 0; i < kProducts; ++i) {
    products[i] = a[i] * b[i];
    largest = std::max(largest, std::abs(products[i]));
  }
  double const step = step_of(largest);
  double sum = cut(accumulator, step);
  for (double const product : products) sum += cut(product, step);
  return cut(sum, step_of(std::abs(sum)));
}

/// What a GEMM does with its partial sums.
enum class Sums {
  promoted,  ///< scaled and added to fp32 every 128 products
  rescaled,  ///< one accumulator, multiplied by s_k / s_k+1 from block to block
};

/// Dot product of row i of a and row j of b, both quantised in blocks of 128 along it.
inline double dot(reference::Quantised const& a, std::int64_t i, reference::Quantised const& b,
                  std::int64_t j, Sums sums) {
  double const *const x = &a.codes[i * a.width], *const y = &b.codes[j * b.width];
  float total = 0;
  double accumulator = 0, scale_before = 1;
  for (std::int64_t k = 0; k < a.width; k += kPromotion) {
    auto const s_a = static_cast<float>(a.scales[a.scale_index(i, k)]);
    auto const s_b = static_cast<float>(b.scales[b.scale_index(j, k)]);
    float const scale = s_a * s_b;
    if (sums == Sums::rescaled && k > 0) {
      accumulator = static_cast<float>(accumulator * (scale_before / scale));
    } else if (sums == Sums::promoted) {
      accumulator = 0;
    }
    for (std::int64_t step = k; step < k + kPromotion; step += kProducts) {
      accumulator = accumulate(accumulator, x + step, y + step);
    }
    scale_before = scale;
    if (sums == Sums::promoted) total = std::fma(static_cast<float>(accumulator), scale, total);
  }
  return sums == Sums::promoted ? total : accumulator * scale_before;
}

}  // namespace tessera::low_precision_tests
