// SPDX-License-Identifier: Apache-2.0
// A launch of one CTA on each of some SMs, beside what other streams do.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace tessera::expert_parallel {

/// begun: null, or an event without timing, recorded when all CTAs have an SM.
template <class Kernel, class Arguments>
cudaError_t launch_on(int sm_count, int threads, std::size_t shared_bytes, cudaStream_t stream,
                      cudaEvent_t begun, Kernel* kernel, Arguments const& args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
  attribute.val.launchCompletionEvent.event = begun;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(sm_count));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = begun != nullptr ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace tessera::expert_parallel
