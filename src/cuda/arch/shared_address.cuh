// SPDX-License-Identifier: Apache-2.0
// A generic pointer into shared memory as the 32-bit address that PTX instructions take.
#pragma once

#include <cstdint>

#define TESSERA_UNROLL _Pragma("unroll")

namespace tessera::cuda::arch {

__device__ __forceinline__ uint32_t shared_address(void const* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

}  // namespace tessera::cuda::arch
