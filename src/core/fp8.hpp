// SPDX-License-Identifier: Apache-2.0
// e4m3 and e8m0, and the scale of a block: value = code * scale. What docs/numerics.md says of FP8, in bits.
//
// e4m3   1 sign, 4 exponent bits with a bias of 7, 3 mantissa bits. Largest value 448 (0x7e), least normal 2^-6, step
//        below it 2^-9. NaN is 0x7f or 0xff; there is no infinity.
// e8m0   a scale of 2^(bits - 127); 0xff is NaN.
// Exponents are read from bits, never from a logarithm. No step is an FMA; s = 2^-127 alone is a subnormal fp32.
#pragma once

#include <cstdint>

#include "core/bf16.hpp"
#include "core/simd.hpp"

namespace tessera::core {

struct E4m3 {
  std::uint8_t bits;
};
struct E8m0 {
  std::uint8_t bits;
};

inline constexpr std::uint32_t kFp32Infinity = 0x7f800000u, kFp32Nan = 0x7fc00000u;
/// Code of every NaN, whatever its sign, so that a block that holds one has equal bytes on every machine.
inline constexpr std::uint8_t kE4m3Nan = 0x7f;

TESSERA_INLINE std::uint32_t fp32_bits(float value) noexcept {
  return __builtin_bit_cast(std::uint32_t, value);
}
TESSERA_INLINE float fp32_of_bits(std::uint32_t bits) noexcept {
  return __builtin_bit_cast(float, bits);
}

TESSERA_INLINE float to_fp32(E4m3 code) noexcept {
  std::uint32_t const sign = (code.bits & 0x80u) << 24, magnitude = code.bits & 0x7fu;
  if (magnitude == 0x7f) return fp32_of_bits(sign | kFp32Nan);
  if (magnitude >= 8) return fp32_of_bits(sign | ((magnitude << 20) + (120u << 23)));
  float const value = static_cast<float>(magnitude) * 0x1p-9f;  // exact
  return fp32_of_bits(sign | fp32_bits(value));
}

TESSERA_INLINE float to_fp32(E8m0 scale) noexcept {
  if (scale.bits == 0xff) return fp32_of_bits(kFp32Nan);
  return fp32_of_bits(scale.bits == 0 ? 0x00400000u : std::uint32_t{scale.bits} << 23);
}

/// To nearest, ties to even; larger than 448, infinity too, becomes 448; -0 stays -0.
template <>
TESSERA_INLINE E4m3 round_to<E4m3>(float value) noexcept {
  std::uint32_t const bits = fp32_bits(value), magnitude = bits & 0x7fffffffu;
  std::uint32_t const sign = bits >> 24 & 0x80u;
  if (magnitude > kFp32Infinity) return {kE4m3Nan};
  if (magnitude > 0x43e00000u) return {static_cast<std::uint8_t>(sign | 0x7eu)};  // 448
  std::uint32_t code = 0;
  if (magnitude <
      0x3c800000u) {  // 2^-6: the sum with 2^14, whose step is 2^-9, rounds to a multiple of it
    code = fp32_bits(fp32_of_bits(magnitude) + 0x1p14f) - fp32_bits(0x1p14f);
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return {static_cast<std::uint8_t>(sign | code)};
}

/// The power of two of a block whose largest magnitude has these bits of fp32 (NaN and infinity above all): the least
/// one under which nothing exceeds 448 or, `floor`, the one that takes the largest exponent to that of 448. For 0 and
/// tiny blocks the least scale, 2^-127.
TESSERA_INLINE E8m0 e8m0_scale(std::uint32_t largest, bool floor) noexcept {
  if (largest >= kFp32Infinity) return {0xff};
  int const exponent = static_cast<int>(largest >> 23);
  int const above = !floor && (largest & 0x7fffffu) > 0x600000u ? 1 : 0;  // mantissa > 1.75
  int const scale = exponent - 8 + above;
  return {static_cast<std::uint8_t>(scale < 0 ? 0 : scale)};
}

/// Scale s and what its block is multiplied by, fp32(1/s).
struct BlockScale {
  float scale, inverse;
};

TESSERA_INLINE BlockScale block_scale(E8m0 scale) noexcept {
  return {to_fp32(scale), to_fp32(E8m0{static_cast<std::uint8_t>(254 - scale.bits)})};  // NaN: 255
}
/// s = max(amax/448, 2^-126), so that amax becomes 448; 1 for a block of zeros.
TESSERA_INLINE BlockScale fp32_scale(std::uint32_t largest) noexcept {
  if (largest >= kFp32Infinity) return {fp32_of_bits(kFp32Nan), fp32_of_bits(kFp32Nan)};
  if (largest == 0) return {1, 1};
  float const scale = fp32_of_bits(largest) * (1.0f / 448.0f);
  float const kept = scale > 0x1p-126f ? scale : 0x1p-126f;
  return {kept, 1.0f / kept};
}
/// The same rounded up to a power of two: that of e8m0_scale(), but for a block of zeros.
TESSERA_INLINE BlockScale pow2_scale(std::uint32_t largest) noexcept {
  if (largest == 0) return {1, 1};
  return block_scale(e8m0_scale(largest, false));
}

TESSERA_INLINE E4m3 quantise(float value, BlockScale const& scale) noexcept {
  return round_to<E4m3>(value * scale.inverse);
}

}  // namespace tessera::core
