// SPDX-License-Identifier: Apache-2.0
// As layer_forward_kernels.cpp, with the neutral kernel that makes dscores.
#include "cuda/instances/sm100/down_projection_dgrad.cu"
#include "cuda/instances/sm100/down_projection_dgrad_gated.cu"
#include "cuda/instances/sm100/down_projection_dgrad_swiglu.cu"
#include "cuda/instances/sm100/down_projection_dgrad_ungated.cu"
#include "cuda/instances/sm100/projection_wgrad.cu"
#include "cuda/instances/sm100/up_projection_dgrad.cu"
#include "cuda/plain/dscores.cu"
