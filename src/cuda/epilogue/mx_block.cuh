// SPDX-License-Identifier: Apache-2.0
// A block of MXFP8: 32 values that one thread holds, as codes of e4m3 and a scale of e8m0 (ScaleRule::rceil). The bytes
// are those of core/fp8.hpp, whatever the values.
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/shared_address.cuh"
#include "core/fp8.hpp"

namespace tessera::cuda::gemm {

struct MxCodes {
  static constexpr int kColumns = 32;
  uint4 low, high;  // of 16 columns each
  uint8_t scale;
};

// code(c): the four codes from column c on, for a scale's inverse.
template <class Code>
__device__ __forceinline__ MxCodes mx_codes(uint32_t largest, Code code) {
  core::E8m0 const scale = core::e8m0_scale(largest, false);
  float const r = core::block_scale(scale).inverse;
  return {{code(0, r), code(4, r), code(8, r), code(12, r)},
          {code(16, r), code(20, r), code(24, r), code(28, r)},
          scale.bits};
}

__device__ __forceinline__ MxCodes mx_codes(float const (&v)[MxCodes::kColumns]) {
  float largest = 0;
  TESSERA_UNROLL
  for (int c = 0; c < MxCodes::kColumns; ++c) largest = arch::max_magnitude(largest, v[c]);
  return mx_codes(__float_as_uint(largest), [&](int c, float r) {
    return arch::pack_e4m3(v[c] * r, v[c + 1] * r, v[c + 2] * r, v[c + 3] * r);
  });
}

// The same of packed pairs of bf16.
__device__ __forceinline__ MxCodes mx_codes(uint32_t const (&pairs)[MxCodes::kColumns / 2]) {
  uint32_t largest = 0;
  TESSERA_UNROLL
  for (int i = 0; i < MxCodes::kColumns / 2; ++i) {
    largest = arch::max_magnitudes_bf16(largest, pairs[i]);
  }
  return mx_codes(max(largest << 16, largest & 0xffff0000u), [&](int c, float r) {
    float2 const v = arch::unpack_bf16(pairs[c / 2]), w = arch::unpack_bf16(pairs[c / 2 + 1]);
    return arch::pack_e4m3(v.x * r, v.y * r, w.x * r, w.y * r);
  });
}

// Returns the scale of a byte.
__device__ __forceinline__ float mx_scale(uint32_t byte) {
  return core::to_fp32(core::E8m0{static_cast<uint8_t>(byte)});
}

}  // namespace tessera::cuda::gemm
