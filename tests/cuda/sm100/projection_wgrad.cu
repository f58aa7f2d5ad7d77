// SPDX-License-Identifier: Apache-2.0
// As down_projection_fwd.cu: for nvcc alone.
#include "cuda/kernels/projection_wgrad_sm100.cuh"

namespace tessera::cuda {

using gemm::Major;

template __global__ void projection_wgrad_sm100<ProjectionWgradSm100<Major::kK, false>>(
    __grid_constant__ ProjectionWgradSm100Params const);
template __global__ void projection_wgrad_sm100<ProjectionWgradSm100<Major::kRows, false>>(
    __grid_constant__ ProjectionWgradSm100Params const);
template __global__ void projection_wgrad_sm100<ProjectionWgradSm100<Major::kK, true>>(
    __grid_constant__ ProjectionWgradSm100Params const);
template __global__ void projection_wgrad_sm100<ProjectionWgradSm100<Major::kRows, true>>(
    __grid_constant__ ProjectionWgradSm100Params const);

}  // namespace tessera::cuda
