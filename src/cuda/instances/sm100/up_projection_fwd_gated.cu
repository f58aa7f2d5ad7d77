// SPDX-License-Identifier: Apache-2.0
// The gated activations but swiglu, in one file: what they share is compiled once.
#include "up_projection_fwd.cuh"

namespace tessera::cuda {

template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::geglu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::geglu_erf>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::reglu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);
template cudaError_t launch_up_projection_fwd_sm100_of<ActivationKind::clamped_swiglu>(
    UpProjectionFwdArguments const&, int, cudaStream_t);

}  // namespace tessera::cuda
