// SPDX-License-Identifier: Apache-2.0
// The choice of activation; each has its instances in a file of its own.
#include "../host/projection.hpp"

namespace tessera::cuda {

template <ActivationKind kKind>
cudaError_t launch_up_projection_fwd_of(UpProjectionFwdArguments const& args, int sm_count,
                                        cudaStream_t stream);

cudaError_t launch_up_projection_fwd(UpProjectionFwdArguments const& args, int sm_count,
                                     cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  auto const launch = [&]() -> decltype(&launch_up_projection_fwd_of<ActivationKind::swiglu>) {
    switch (args.activation.kind) {
      case ActivationKind::swiglu:
        return launch_up_projection_fwd_of<ActivationKind::swiglu>;
      case ActivationKind::geglu:
        return launch_up_projection_fwd_of<ActivationKind::geglu>;
      case ActivationKind::geglu_erf:
        return launch_up_projection_fwd_of<ActivationKind::geglu_erf>;
      case ActivationKind::reglu:
        return launch_up_projection_fwd_of<ActivationKind::reglu>;
      case ActivationKind::clamped_swiglu:
        return launch_up_projection_fwd_of<ActivationKind::clamped_swiglu>;
      case ActivationKind::relu:
        return launch_up_projection_fwd_of<ActivationKind::relu>;
      case ActivationKind::relu2:
        return launch_up_projection_fwd_of<ActivationKind::relu2>;
      case ActivationKind::silu:
        return launch_up_projection_fwd_of<ActivationKind::silu>;
      case ActivationKind::gelu:
        return launch_up_projection_fwd_of<ActivationKind::gelu>;
      case ActivationKind::gelu_erf:
        return launch_up_projection_fwd_of<ActivationKind::gelu_erf>;
    }
    return nullptr;
  }();
  return launch == nullptr ? cudaErrorInvalidValue : launch(args, sm_count, stream);
}

}  // namespace tessera::cuda
