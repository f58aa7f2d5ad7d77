// SPDX-License-Identifier: Apache-2.0
// Launchers of the GEMMs of sm_100a, for calls that refuse_sm100() of layer/select.hpp lets pass too. A library without
// them (TESSERA_CUDA_ARCHS) has layer/sm100_not_built.cpp.
#pragma once

#include "projection.hpp"
#include "projection_backward.hpp"

namespace tessera::cuda {

cudaError_t launch_up_projection_fwd_sm100(UpProjectionFwdArguments const& args, int sm_count,
                                           cudaStream_t stream);
cudaError_t launch_down_projection_fwd_sm100(DownProjectionFwdArguments const& args, int sm_count,
                                             cudaStream_t stream);
cudaError_t launch_down_projection_dgrad_sm100(DownProjectionDgradArguments const& args,
                                               int sm_count, cudaStream_t stream);
cudaError_t launch_up_projection_dgrad_sm100(UpProjectionDgradArguments const& args, int sm_count,
                                             cudaStream_t stream);
cudaError_t launch_projection_wgrad_sm100(WgradArguments const& args, int sm_count,
                                          cudaStream_t stream);

}  // namespace tessera::cuda
