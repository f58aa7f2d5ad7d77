// SPDX-License-Identifier: Apache-2.0
#include "../../kernels/quantise_mxfp8.cuh"

namespace tessera::cuda {

cudaError_t launch_quantise_rows_mxfp8(QuantiseRowsMxfp8Arguments const& args,
                                       cudaStream_t stream) {
  return launch_quantise_rows_mxfp8_kernel(args, stream);
}

cudaError_t launch_dequantise_rows_mxfp8(DequantiseRowsMxfp8Arguments const& args,
                                         cudaStream_t stream) {
  return launch_dequantise_rows_mxfp8_kernel(args, stream);
}

cudaError_t launch_quantise_weights_mxfp8(QuantiseWeightsMxfp8Arguments const& args,
                                          cudaStream_t stream) {
  return launch_quantise_weights_mxfp8_kernel(args, stream);
}

}  // namespace tessera::cuda
