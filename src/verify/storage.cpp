// SPDX-License-Identifier: Apache-2.0
// bf16 is the upper half of fp32; fp16 has 11 significant bits and exponents -14..15.
#include "verify/storage.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace tessera::verify {
namespace {

float round_to_bf16(float value) noexcept {
  if (std::isnan(value)) return value;
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0x7fff + ((bits >> 16) & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

float round_to_fp16(float value) noexcept {
  if (!std::isfinite(value) || value == 0) return value;
  float const step = spacing_at(DType::fp16, value);
  float const rounded = std::nearbyint(value / step) * step;
  return std::abs(rounded) > 65504 ? std::copysign(HUGE_VALF, value) : rounded;
}

std::uint16_t fp16_bits(float value) noexcept {
  std::uint16_t const sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  float const size = std::abs(value);
  if (size < std::ldexp(1.0f, -14)) {
    return sign | static_cast<std::uint16_t>(std::ldexp(size, 24));
  }
  int exponent = 0;
  float const fraction = std::frexp(size, &exponent);
  return static_cast<std::uint16_t>(sign | ((exponent + 14) << 10) |
                                    (static_cast<int>(std::ldexp(fraction, 11)) & 0x3ff));
}

float fp16_value(std::uint16_t bits) noexcept {
  int const exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  float size = 0;
  if (exponent == 31) {
    size = fraction != 0 ? NAN : HUGE_VALF;
  } else if (exponent == 0) {
    size = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    size = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

}  // namespace

float round_to(DType dtype, float value) noexcept {
  if (dtype == DType::bf16) return round_to_bf16(value);
  if (dtype == DType::fp16) return round_to_fp16(value);
  return value;
}

void round_all(DType dtype, std::span<float> values) noexcept {
  if (dtype == DType::fp32) return;
  for (float& value : values) value = round_to(dtype, value);
}

float spacing_at(DType dtype, float value) noexcept {
  float const power = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x7f800000u);
  if (dtype == DType::bf16) return power * 0x1p-7f;
  if (dtype == DType::fp16) return std::max(power * 0x1p-10f, 0x1p-24f);
  return 0;
}

double unit_roundoff(DType dtype) noexcept {
  switch (dtype) {
    case DType::bf16:
      return std::ldexp(1.0, -8);
    case DType::fp16:
      return std::ldexp(1.0, -11);
    default:
      return std::ldexp(1.0, -21);
  }
}

void pack(DType dtype, std::span<float const> values, void* to) noexcept {
  if (values.empty()) return;
  if (dtype == DType::fp32) {
    std::memcpy(to, values.data(), values.size_bytes());
    return;
  }
  auto* const halves = static_cast<std::uint16_t*>(to);
  for (std::size_t i = 0; i < values.size(); ++i) {
    halves[i] = dtype == DType::fp16
                    ? fp16_bits(values[i])
                    : static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[i]) >> 16);
  }
}

std::vector<float> unpack(DType dtype, void const* from, std::size_t count) {
  std::vector<float> values(count);
  if (count == 0) return values;
  if (dtype == DType::fp32) {
    std::memcpy(values.data(), from, count * sizeof(float));
    return values;
  }
  auto const* const halves = static_cast<std::uint16_t const*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = dtype == DType::fp16 ? fp16_value(halves[i])
                                     : std::bit_cast<float>(std::uint32_t{halves[i]} << 16);
  }
  return values;
}

}  // namespace tessera::verify
