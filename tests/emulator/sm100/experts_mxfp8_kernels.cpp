// SPDX-License-Identifier: Apache-2.0
// The instances of sm_100a that experts of MXFP8 take, as a library would have them: included, so that what they
// include is emulated.
#include "cuda/instances/sm100/down_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/down_projection_fwd_mxfp8.cu"
#include "cuda/instances/sm100/projection_wgrad.cu"
#include "cuda/instances/sm100/quantise_mxfp8.cu"
#include "cuda/instances/sm100/up_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/up_projection_fwd_mxfp8.cu"
