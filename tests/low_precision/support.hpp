// SPDX-License-Identifier: Apache-2.0
// Data of the low-precision tests, and bytes of the library as numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/fp8.hpp"
#include "cpu/reference/quantise.hpp"
#include "tessera/low_precision.hpp"
#include "verify/random_source.hpp"

namespace tessera::low_precision_tests {

using reference::Block;
using reference::Values;

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline Context const& context(int threads) {
  static Context const one = std::move(Context::create({.device = {}, .num_threads = 1})).value();
  static Context const three = std::move(Context::create({.device = {}, .num_threads = 3})).value();
  return threads == 1 ? one : three;
}

/// N(0, scale) rounded to bf16.
inline Values normal(std::int64_t count, std::uint64_t stream, double scale = 1) {
  verify::RandomSource random(48, stream);
  Values out(count);
  for (double& value : out) value = reference::to_bf16(scale * random.normal());
  return out;
}

inline Block block_of(QuantiseBlock block) {
  switch (block) {
    case QuantiseBlock::row_128:
      return {1, 128};
    case QuantiseBlock::square_128:
      return {128, 128};
    case QuantiseBlock::row_32:
      return {1, 32};
    case QuantiseBlock::column_32:
      return {32, 1};
    case QuantiseBlock::square_32:
      break;
  }
  return {32, 32};
}

/// Values that are bf16 numbers, as the library stores them.
inline std::vector<core::Bf16> packed(Values const& values) {
  std::vector<core::Bf16> out;
  for (double const value : values) {
    out.push_back(core::round_to<core::Bf16>(static_cast<float>(value)));
  }
  return out;
}

/// The code of an e4m3 value: its exponent and mantissa, put together by arithmetic.
inline std::uint8_t code_of(double value) {
  if (std::isnan(value)) return core::kE4m3Nan;
  double const magnitude = std::abs(value);
  int const sign = std::signbit(value) ? 0x80 : 0;
  if (magnitude < 0x1p-6) return static_cast<std::uint8_t>(sign + std::lround(magnitude * 512));
  int const exponent = std::ilogb(magnitude);
  return static_cast<std::uint8_t>(sign + (exponent + 7) * 8 +
                                   std::lround((std::ldexp(magnitude, -exponent) - 1) * 8));
}

/// The byte of an e8m0 scale.
inline std::uint8_t e8m0_of(double scale) {
  return static_cast<std::uint8_t>(std::isnan(scale) ? 255 : std::ilogb(scale) + 127);
}

}  // namespace tessera::low_precision_tests
