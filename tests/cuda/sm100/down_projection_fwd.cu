// SPDX-License-Identifier: Apache-2.0
// The kernels of sm_100a that there are, for nvcc alone: no library has them, as nothing selects them.
#include "cuda/kernels/down_projection_fwd_sm100.cuh"

namespace tessera::cuda {

using gemm::Major;

template __global__ void down_projection_fwd_sm100<DownProjectionFwdSm100<Major::kK>>(
    __grid_constant__ DownProjectionFwdSm100Params const);
template __global__ void down_projection_fwd_sm100<DownProjectionFwdSm100<Major::kRows>>(
    __grid_constant__ DownProjectionFwdSm100Params const);

template __global__ void down_projection_fwd_sm100<DownProjectionFwdSm100Pair<Major::kK>>(
    __grid_constant__ DownProjectionFwdSm100Params const);
template __global__ void down_projection_fwd_sm100<DownProjectionFwdSm100Pair<Major::kRows>>(
    __grid_constant__ DownProjectionFwdSm100Params const);

}  // namespace tessera::cuda
