// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    std::uint32_t const of_float = std::bit_cast<std::uint32_t>(value);
    bool const is_nan = value != value;
    bits = is_nan ? 0x7fff
                  : static_cast<std::uint16_t>((of_float + 0x7fff + (of_float >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rz(float value) {
  return __nv_bfloat16(std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0xffff0000u));
}
