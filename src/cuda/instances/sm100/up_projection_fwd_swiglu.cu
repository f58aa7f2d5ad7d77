// SPDX-License-Identifier: Apache-2.0
#include "up_projection_fwd.cuh"

namespace tessera::cuda {

template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::swiglu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
