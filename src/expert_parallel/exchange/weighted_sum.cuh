// SPDX-License-Identifier: Apache-2.0
// Eight columns of rows of bf16, 16 bytes each, added up in fp32.
#pragma once

#include "cuda/arch/approx_math.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

__device__ inline void add_weighted(float (&sum)[8], float weight, uint4 const& bits) {
  std::uint32_t const pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  TESSERA_UNROLL
  for (int pair = 0; pair < 4; ++pair) {
    float2 const value = arch::unpack_bf16(pairs[pair]);
    sum[2 * pair] = fmaf(weight, value.x, sum[2 * pair]);
    sum[2 * pair + 1] = fmaf(weight, value.y, sum[2 * pair + 1]);
  }
}

__device__ inline uint4 rounded_sum(float const (&sum)[8]) {
  return {arch::pack_bf16(sum[0], sum[1]), arch::pack_bf16(sum[2], sum[3]),
          arch::pack_bf16(sum[4], sum[5]), arch::pack_bf16(sum[6], sum[7])};
}

}  // namespace tessera::expert_parallel
