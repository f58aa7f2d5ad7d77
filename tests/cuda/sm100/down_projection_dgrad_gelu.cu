// SPDX-License-Identifier: Apache-2.0
// The gradient of an activation without a gate, for nvcc alone: src/cuda/instances/sm100 has swiglu so far.
#include "cuda/kernels/down_projection_dgrad_sm100.cuh"

namespace tessera::cuda {

template __global__ void
down_projection_dgrad_sm100<DownProjectionDgradSm100<ActivationKind::gelu_erf, gemm::Major::kRows>>(
    __grid_constant__ DownProjectionDgradSm100Params const);

}  // namespace tessera::cuda
