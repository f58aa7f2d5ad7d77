// SPDX-License-Identifier: Apache-2.0
// Functions of the CUDA driver, found at run time so that nothing links against libcuda.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace tessera::cuda::host {

/// The function as of CUDA `version` (12000: 12.0), that of its type PFN_<name>_v<version>; null without it.
template <class Function>
Function driver_function(char const* name, unsigned version) noexcept {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  bool const there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return reinterpret_cast<Function>(there ? entry : nullptr);
}

}  // namespace tessera::cuda::host
