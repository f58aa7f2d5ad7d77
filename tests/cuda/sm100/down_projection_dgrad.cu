// SPDX-License-Identifier: Apache-2.0
// As down_projection_fwd.cu: for nvcc alone.
#include "cuda/kernels/down_projection_dgrad_sm100.cuh"

namespace tessera::cuda {

using gemm::Major;

template <ActivationKind kKind, Major kMajor>
using One = DownProjectionDgradSm100<kKind, kMajor>;

template __global__ void down_projection_dgrad_sm100<One<ActivationKind::swiglu, Major::kK>>(
    __grid_constant__ DownProjectionDgradSm100Params const);
template __global__ void down_projection_dgrad_sm100<One<ActivationKind::swiglu, Major::kRows>>(
    __grid_constant__ DownProjectionDgradSm100Params const);
template __global__ void down_projection_dgrad_sm100<One<ActivationKind::gelu_erf, Major::kRows>>(
    __grid_constant__ DownProjectionDgradSm100Params const);

}  // namespace tessera::cuda
