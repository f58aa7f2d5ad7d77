// SPDX-License-Identifier: Apache-2.0
// The activations without a gate, in one file: what they share is compiled once.
#include "up_projection_fwd.cuh"

namespace tessera::cuda {

template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::relu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::relu2>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::silu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::gelu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::gelu_erf>(
    UpProjectionFwdArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
