// SPDX-License-Identifier: Apache-2.0
#include "../kernels/up_projection_fwd_e4m3.cuh"
#include "../tuning/low_precision.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Element kOut>
cudaError_t launch(UpProjectionFwdE4m3Arguments const& args, int sm_count, cudaStream_t stream) {
  if (args.activation.kind != ActivationKind::swiglu) return cudaErrorInvalidValue;
  return launch_up_projection_fwd_e4m3_config<
      UpProjectionFwdE4m3Config<ActivationKind::swiglu, kOut>>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_up_projection_fwd_e4m3(UpProjectionFwdE4m3Arguments const& args, int sm_count,
                                          cudaStream_t stream) {
  return launch<gemm::Element::kE4m3>(args, sm_count, stream);
}

cudaError_t launch_up_projection_fwd_e4m3_to_bf16(UpProjectionFwdE4m3Arguments const& args,
                                                  int sm_count, cudaStream_t stream) {
  return launch<gemm::Element::kBf16>(args, sm_count, stream);
}

}  // namespace tessera::cuda
