// SPDX-License-Identifier: Apache-2.0
// The activations without a gate, in one file: what they share is compiled once.
#include "down_projection_dgrad.cuh"

namespace tessera::cuda {

template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::relu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::relu2>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::silu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::gelu>(
    DownProjectionDgradArguments const&, int, cudaStream_t);
template cudaError_t launch_down_projection_dgrad_sm100_of<ActivationKind::gelu_erf>(
    DownProjectionDgradArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
