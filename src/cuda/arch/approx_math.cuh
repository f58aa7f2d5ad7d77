// SPDX-License-Identifier: Apache-2.0
// One-instruction approximations of the special function unit, and packing to bf16.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

// Largest relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x, relative error about 2^-22.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x within 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, rounded to nearest, of an x whose reciprocal is a normal number; NaN of NaN. Without the branch of a division.
__device__ __forceinline__ float reciprocal(float x) {
  float const near = rcp_approx(x);
  return fmaf(near, fmaf(-x, near, 1.0f), near);
}

// Round to nearest even; `low` goes to the lower half, that is, to the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

// Digit i of the selector, from the lowest, names byte i of the result: 0 to 3 of `first`, 4 to 7 of `second`.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t first, uint32_t second,
                                                  uint32_t selector) {
  return __byte_perm(first, second, selector);
}

// These return the lower, or the upper, halves of two pairs.
__device__ __forceinline__ uint32_t low_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}

}  // namespace tessera::cuda::arch
