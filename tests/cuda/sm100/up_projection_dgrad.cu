// SPDX-License-Identifier: Apache-2.0
// As down_projection_fwd.cu: for nvcc alone.
#include "cuda/kernels/up_projection_dgrad_sm100.cuh"

namespace tessera::cuda {

using gemm::Major;

template __global__ void up_projection_dgrad_sm100<UpProjectionDgradSm100<Major::kK>>(
    __grid_constant__ UpProjectionDgradSm100Params const);
template __global__ void up_projection_dgrad_sm100<UpProjectionDgradSm100<Major::kRows>>(
    __grid_constant__ UpProjectionDgradSm100Params const);

template __global__ void up_projection_dgrad_sm100<UpProjectionDgradSm100Pair<Major::kK>>(
    __grid_constant__ UpProjectionDgradSm100Params const);
template __global__ void up_projection_dgrad_sm100<UpProjectionDgradSm100Pair<Major::kRows>>(
    __grid_constant__ UpProjectionDgradSm100Params const);

}  // namespace tessera::cuda
