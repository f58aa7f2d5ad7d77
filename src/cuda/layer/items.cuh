// SPDX-License-Identifier: Apache-2.0
// Launches of small kernels that have a thread for each item.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace tessera::cuda {

constexpr int kItemThreads = 256;

__device__ inline int64_t item_idx() { return int64_t{blockIdx.x} * kItemThreads + threadIdx.x; }

/// Items beyond the last are for the kernel to leave out.
template <class Arguments>
cudaError_t launch_for_items(void (*kernel)(Arguments), int64_t items, Arguments const& args,
                             cudaStream_t stream) {
  if (items == 0) return cudaSuccess;
  int64_t const ctas = (items + kItemThreads - 1) / kItemThreads;
  if (ctas > INT_MAX) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(ctas), kItemThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
