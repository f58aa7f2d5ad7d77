// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of sm_100a, for nvcc alone: no library has it, as nothing selects it.
#include "cuda/kernels/up_projection_fwd_sm100.cuh"

namespace tessera::cuda {

using gemm::Major;

template <Major kMajor>
using One = UpProjectionFwdSm100<ActivationKind::swiglu, kMajor>;
template <Major kMajor>
using Pair = UpProjectionFwdSm100Pair<ActivationKind::swiglu, kMajor>;

template __global__ void up_projection_fwd_sm100<One<Major::kK>>(
    __grid_constant__ UpProjectionFwdSm100Params const);
template __global__ void up_projection_fwd_sm100<One<Major::kRows>>(
    __grid_constant__ UpProjectionFwdSm100Params const);
template __global__ void up_projection_fwd_sm100<Pair<Major::kK>>(
    __grid_constant__ UpProjectionFwdSm100Params const);
template __global__ void up_projection_fwd_sm100<Pair<Major::kRows>>(
    __grid_constant__ UpProjectionFwdSm100Params const);

template <Major kMajor>
using Gathered = UpProjectionFwdSm100Gathered<ActivationKind::swiglu, kMajor>;
template __global__ void up_projection_fwd_sm100<Gathered<Major::kK>>(
    __grid_constant__ UpProjectionFwdSm100Params const);
template __global__ void up_projection_fwd_sm100<Gathered<Major::kRows>>(
    __grid_constant__ UpProjectionFwdSm100Params const);

}  // namespace tessera::cuda
