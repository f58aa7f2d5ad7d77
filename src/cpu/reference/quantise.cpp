// SPDX-License-Identifier: Apache-2.0
// amax = max |v| of the block;  s by the rule;  r = fp32(1/s);  code = e4m3(fp32(v r)).
// An operation of fp32 is one of fp64 that is rounded: products of two fp32 are exact there, and a quotient has so many
// bits that rounding it twice does no harm.
#include "cpu/reference/quantise.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::reference {
namespace {

constexpr double kLargest = 448;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double to_fp32(double value) { return static_cast<double>(static_cast<float>(value)); }

/// 2^exponent with amax = m 2^exponent, 1 <= m < 2, over 2^8, the largest exponent of e4m3; twice that where m > 1.75,
/// the mantissa of 448, unless `floor`. e8m0 ends at 2^-127.
double power_scale(double largest, bool floor) {
  int exponent = 0;
  double const half_mantissa = std::frexp(largest, &exponent);
  exponent -= 1;
  bool const above = !floor && 2 * half_mantissa > 1.75;
  return std::ldexp(1.0, std::max(exponent - 8 + (above ? 1 : 0), -127));
}

}  // namespace

double to_e4m3(double value) {
  if (std::isnan(value)) return value;
  double const magnitude = std::abs(value);
  if (magnitude > kLargest) return std::copysign(kLargest, value);
  int const exponent = magnitude == 0 ? -6 : std::max(std::ilogb(magnitude), -6);
  double const step = std::ldexp(1.0, exponent - 3);
  return std::copysign(std::nearbyint(magnitude / step) * step, value);  // to nearest even
}

double to_bf16(double value) {
  float const once = static_cast<float>(value);
  if (once == 0 || !std::isfinite(once)) return once;
  int const exponent = std::max(std::ilogb(once), -126);
  double const step = std::ldexp(1.0, exponent - 7);
  double const rounded = std::nearbyint(once / step) * step;
  return std::abs(rounded) < 0x1p128 ? rounded : std::copysign(HUGE_VAL, rounded);
}

Scale scale_of(double largest, ScaleRule rule) {
  if (!std::isfinite(largest)) return {kNan, kNan};
  double scale = 1;
  switch (rule) {
    case ScaleRule::fp32:
      if (largest > 0) scale = std::max(to_fp32(largest * to_fp32(1 / kLargest)), 0x1p-126);
      break;
    case ScaleRule::pow2:
      if (largest > 0) scale = power_scale(largest, false);
      break;
    case ScaleRule::rceil:
    case ScaleRule::floor:
      scale = largest > 0 ? power_scale(largest, rule == ScaleRule::floor) : 0x1p-127;
      break;
  }
  return {scale, to_fp32(1 / scale)};
}

Quantised quantise(Values const& values, std::int64_t rows, std::int64_t width, Block block,
                   ScaleRule rule) {
  Quantised out{rows, width, block, values, Values(rows / block.rows * (width / block.columns))};
  Values largest(out.scales.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      double& most = largest[out.scale_index(r, c)];
      double const magnitude = std::abs(values[r * width + c]);
      if (std::isnan(magnitude) || magnitude > most) most = std::isnan(most) ? most : magnitude;
    }
  }
  Values inverse(largest.size());
  for (std::size_t i = 0; i < largest.size(); ++i) {
    auto const scale = scale_of(largest[i], rule);
    out.scales[i] = scale.scale;
    inverse[i] = scale.inverse;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      double& code = out.codes[r * width + c];
      code = to_e4m3(to_fp32(code * inverse[out.scale_index(r, c)]));
    }
  }
  return out;
}

Values dequantised(Quantised const& quantised) {
  Values out = quantised.codes;
  for (std::int64_t r = 0; r < quantised.rows; ++r) {
    for (std::int64_t c = 0; c < quantised.width; ++c) {
      out[r * quantised.width + c] *= quantised.scales[quantised.scale_index(r, c)];
    }
  }
  return out;
}

}  // namespace tessera::reference
