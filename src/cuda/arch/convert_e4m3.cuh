// SPDX-License-Identifier: Apache-2.0
// Instructions for blocks of e4m3: conversion, and the largest magnitude of a block.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

// Codes of four values, the first in the lowest byte: to nearest, ties to even, at most 448; every NaN becomes 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float v0, float v1, float v2, float v3) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v1), "f"(v0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v3), "f"(v2));
  return uint32_t{low} | uint32_t{high} << 16;
}

// max(largest, |value|), NaN where either is.
__device__ __forceinline__ float max_magnitude(float largest, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(largest), "f"(fabsf(value)));
  return result;
}

// Returns the larger bits of each half of two pairs of bf16, without their signs: NaN is above infinity.
__device__ __forceinline__ uint32_t max_magnitudes_bf16(uint32_t largest, uint32_t pair) {
  return __vmaxu2(largest, pair & 0x7fff7fffu);
}

}  // namespace tessera::cuda::arch
