// SPDX-License-Identifier: Apache-2.0
// Instructions for blocks of e4m3: conversion, and the largest magnitude of a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda::arch {

// Codes of four values, the first in the lowest byte: to nearest, ties to even, at most 448; every NaN becomes 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float v0, float v1, float v2, float v3) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v1), "f"(v0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v3), "f"(v2));
  return uint32_t{low} | uint32_t{high} << 16;
}

// Values of four codes, the first from the lowest byte: exact.
__device__ __forceinline__ float4 unpack_e4m3(uint32_t codes) {
  float4 v;
  asm("{\n"
      ".reg .b16 low, high, h0, h1, h2, h3;\n"
      ".reg .b32 first, second;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 first, low;\n"
      "cvt.rn.f16x2.e4m3x2 second, high;\n"
      "mov.b32 {h0, h1}, first;\n"
      "mov.b32 {h2, h3}, second;\n"
      "cvt.f32.f16 %0, h0;\n"
      "cvt.f32.f16 %1, h1;\n"
      "cvt.f32.f16 %2, h2;\n"
      "cvt.f32.f16 %3, h3;\n"
      "}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(codes));
  return v;
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

// Returns the larger magnitudes of each half of two pairs of bf16, with either sign; NaN where either is.
__device__ __forceinline__ uint32_t larger_magnitudes_bf16(uint32_t first, uint32_t second) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(first), "r"(second));
  return larger;
}

}  // namespace tessera::cuda::arch
