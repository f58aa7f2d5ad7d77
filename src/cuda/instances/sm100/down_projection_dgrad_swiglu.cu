// SPDX-License-Identifier: Apache-2.0
#include "down_projection_dgrad.cuh"

namespace tessera::cuda {

template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::swiglu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
