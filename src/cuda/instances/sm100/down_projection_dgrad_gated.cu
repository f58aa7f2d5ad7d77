// SPDX-License-Identifier: Apache-2.0
// The gated activations but swiglu, in one file: what they share is compiled once.
#include "down_projection_dgrad.cuh"

namespace tessera::cuda {

template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::geglu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::geglu_erf>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::reglu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::clamped_swiglu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
