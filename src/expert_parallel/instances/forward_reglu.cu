// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/fused/forward.cuh"

namespace tessera::expert_parallel {

template cudaError_t launch_forward_of<ActivationKind::reglu>(ForwardParams const&, int,
                                                              cudaStream_t);

}  // namespace tessera::expert_parallel
