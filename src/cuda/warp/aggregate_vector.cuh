// SPDX-License-Identifier: Apache-2.0
// Sixteen bytes of a row, added to fp32 sums: what aggregate does with a slot's row.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/shared_address.cuh"

namespace tessera::cuda {

constexpr int kAggregateVectorBytes = 16;

// Element: fp32 or bf16.
template <class Element>
struct AggregateVector;

template <>
struct AggregateVector<float> {
  static constexpr int kElements = 4;
  __device__ static void add(float (&sum)[kElements], uint4 bits, float score) {
    sum[0] = fmaf(score, __uint_as_float(bits.x), sum[0]);
    sum[1] = fmaf(score, __uint_as_float(bits.y), sum[1]);
    sum[2] = fmaf(score, __uint_as_float(bits.z), sum[2]);
    sum[3] = fmaf(score, __uint_as_float(bits.w), sum[3]);
  }
  __device__ static uint4 round(float const (&sum)[kElements]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
            __float_as_uint(sum[3])};
  }
};

template <>
struct AggregateVector<__nv_bfloat16> {
  static constexpr int kElements = 8;
  // A bf16 is the upper half of the fp32 of the same value; the lower address is the lower half.
  __device__ static void add_pair(float* sum, uint32_t pair, float score) {
    sum[0] = fmaf(score, __uint_as_float(pair << 16), sum[0]);
    sum[1] = fmaf(score, __uint_as_float(pair & 0xffff0000u), sum[1]);
  }
  __device__ static void add(float (&sum)[kElements], uint4 bits, float score) {
    add_pair(sum + 0, bits.x, score);
    add_pair(sum + 2, bits.y, score);
    add_pair(sum + 4, bits.z, score);
    add_pair(sum + 6, bits.w, score);
  }
  __device__ static uint32_t round_pair(float const* sum) {
    uint32_t const low = __bfloat16_as_ushort(__float2bfloat16_rn(sum[0]));
    uint32_t const high = __bfloat16_as_ushort(__float2bfloat16_rn(sum[1]));
    return low | high << 16;
  }
  __device__ static uint4 round(float const (&sum)[kElements]) {
    return {round_pair(sum + 0), round_pair(sum + 2), round_pair(sum + 4), round_pair(sum + 6)};
  }
};

}  // namespace tessera::cuda
