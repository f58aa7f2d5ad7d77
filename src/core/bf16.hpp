// SPDX-License-Identifier: Apache-2.0
// bf16, the upper half of an fp32, and the storage types of a layer: one way to read and to round each.
#pragma once

#include <cstdint>

#include "core/simd.hpp"
#include "tessera/tensor.hpp"

namespace tessera::core {

struct Bf16 {
  std::uint16_t bits;
};

TESSERA_INLINE float to_fp32(float value) noexcept { return value; }
TESSERA_INLINE float to_fp32(Bf16 value) noexcept {
  return __builtin_bit_cast(float, std::uint32_t{value.bits} << 16);
}

/// `value` rounded to T, to nearest even; NaN stays NaN, denormals are kept.
template <class T>
TESSERA_INLINE T round_to(float value) noexcept;
template <>
TESSERA_INLINE float round_to<float>(float value) noexcept {
  return value;
}
template <>
TESSERA_INLINE Bf16 round_to<Bf16>(float value) noexcept {
  auto const bits = __builtin_bit_cast(std::uint32_t, value);
  std::uint32_t const rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  bool const nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<std::uint16_t>((nan ? quiet : rounded) >> 16)};
}

template <class T>
inline constexpr DType kDTypeOf = DType::none;
template <>
inline constexpr DType kDTypeOf<float> = DType::fp32;
template <>
inline constexpr DType kDTypeOf<Bf16> = DType::bf16;

}  // namespace tessera::core
