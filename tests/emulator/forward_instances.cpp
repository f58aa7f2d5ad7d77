// SPDX-License-Identifier: Apache-2.0
// The fused forward kernel for swiglu, and its launcher, which names all activations. Two others have a file of their
// own, so that a mutant of the kernel compiles for one.
#include "expert_parallel/fused/forward.cu"
#include "expert_parallel/fused/forward.cuh"

namespace tessera::expert_parallel {

template cudaError_t launch_forward_of<ActivationKind::swiglu>(ForwardParams const&, int,
                                                               cudaStream_t);
extern template cudaError_t launch_forward_of<ActivationKind::clamped_swiglu>(ForwardParams const&,
                                                                              int, cudaStream_t);
extern template cudaError_t launch_forward_of<ActivationKind::relu2>(ForwardParams const&, int,
                                                                     cudaStream_t);

#define TESSERA_NOT_EMULATED(kind)                                                               \
  template <>                                                                                    \
  cudaError_t launch_forward_of<ActivationKind::kind>(ForwardParams const&, int, cudaStream_t) { \
    return cudaErrorNotSupported;                                                                \
  }
TESSERA_NOT_EMULATED(geglu)
TESSERA_NOT_EMULATED(reglu)
TESSERA_NOT_EMULATED(gelu)
TESSERA_NOT_EMULATED(relu)
TESSERA_NOT_EMULATED(silu)
TESSERA_NOT_EMULATED(geglu_erf)
TESSERA_NOT_EMULATED(gelu_erf)

}  // namespace tessera::expert_parallel
