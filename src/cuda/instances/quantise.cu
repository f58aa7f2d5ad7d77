// SPDX-License-Identifier: Apache-2.0
#include "../kernels/quantise.cuh"

namespace tessera::cuda {

cudaError_t launch_quantise_rows(QuantiseRowsArguments const& args, cudaStream_t stream) {
  return launch_quantise_rows_kernel(args, stream);
}

cudaError_t launch_quantise_weights(QuantiseWeightsArguments const& args, cudaStream_t stream) {
  return launch_quantise_weights_kernel(args, stream);
}

cudaError_t launch_turn_scales(TurnScalesArguments const& args, cudaStream_t stream) {
  return launch_turn_scales_kernel(args, stream);
}

cudaError_t launch_dequantise_rows(DequantiseRowsArguments const& args, cudaStream_t stream) {
  return launch_dequantise_rows_kernel(args, stream);
}

}  // namespace tessera::cuda
