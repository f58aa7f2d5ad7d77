// SPDX-License-Identifier: Apache-2.0
#include "../../host/activation_kinds.hpp"
#include "../../host/projection_sm100.hpp"

namespace tessera::cuda {

template <ActivationKind kKind>
cudaError_t launch_up_projection_fwd_sm100_of(UpProjectionFwdArguments const& args, int sm_count,
                                              cudaStream_t stream);

cudaError_t launch_up_projection_fwd_sm100(UpProjectionFwdArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  return with_activation_kind(args.activation.kind, [&](auto kind) {
    return launch_up_projection_fwd_sm100_of<decltype(kind)::value>(args, sm_count, stream);
  });
}

}  // namespace tessera::cuda
