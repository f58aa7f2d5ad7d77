// SPDX-License-Identifier: Apache-2.0
#include "dist/kernels/forward.cuh"

namespace tessera::dist {

template cudaError_t launch_forward_of<ActivationKind::gelu_erf>(ForwardParams const&, int,
                                                                 cudaStream_t);

}  // namespace tessera::dist
