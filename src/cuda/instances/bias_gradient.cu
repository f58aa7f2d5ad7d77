// SPDX-License-Identifier: Apache-2.0
#include "../kernels/bias_gradient.cuh"

namespace tessera::cuda {

cudaError_t launch_bias_gradient(BiasGradientArguments const& args, cudaStream_t stream) {
  int64_t const width = args.halves * args.columns;
  int64_t const ctas =
      args.experts * ((width + BiasGradientConfig::kColumns - 1) / BiasGradientConfig::kColumns);
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  auto const grid = static_cast<unsigned>(ctas);
  if (args.is_fp32) {
    bias_gradient<float><<<grid, BiasGradientConfig::kThreads, 0, stream>>>(args);
  } else {
    bias_gradient<__nv_bfloat16><<<grid, BiasGradientConfig::kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace tessera::cuda
