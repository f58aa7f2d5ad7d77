// SPDX-License-Identifier: Apache-2.0
// The fused forward kernel for two further activations.
#include "expert_parallel/fused/forward.cuh"

namespace tessera::expert_parallel {

template cudaError_t launch_forward_of<ActivationKind::clamped_swiglu>(ForwardParams const&, int,
                                                                       cudaStream_t);
template cudaError_t launch_forward_of<ActivationKind::relu2>(ForwardParams const&, int,
                                                              cudaStream_t);

}  // namespace tessera::expert_parallel
