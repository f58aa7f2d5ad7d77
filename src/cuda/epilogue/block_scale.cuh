// SPDX-License-Identifier: Apache-2.0
// The scale of a block of 128 from its largest magnitude, as bits of fp32: that of core::fp32_scale(), without
// branches. Values are multiplied by its arch::reciprocal().
#pragma once

#include "core/fp8.hpp"

namespace tessera::cuda::gemm {

__device__ __forceinline__ float block_scale(uint32_t largest) {
  float const scale = fmaxf(__uint_as_float(largest) * (1.0f / 448.0f), 0x1p-126f);
  float const of_number = largest == 0 ? 1.0f : scale;
  return largest >= core::kFp32Infinity ? __uint_as_float(core::kFp32Nan) : of_number;
}

}  // namespace tessera::cuda::gemm
