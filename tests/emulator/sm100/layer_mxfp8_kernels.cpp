// SPDX-License-Identifier: Apache-2.0
// What a layer of precision mxfp8 launches on sm_100a, as a library would have it: included, so that what the instances
// include is emulated; with the neutral kernel that makes dscores, without the quantisers, which their test includes.
#include "cuda/instances/sm100/down_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/down_projection_fwd_mxfp8.cu"
#include "cuda/instances/sm100/projection_wgrad.cu"
#include "cuda/instances/sm100/up_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/up_projection_fwd_mxfp8.cu"
#include "cuda/plain/dscores.cu"
