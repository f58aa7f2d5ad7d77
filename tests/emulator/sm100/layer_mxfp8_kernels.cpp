// SPDX-License-Identifier: Apache-2.0
// This file includes the instances that a layer of precision mxfp8 launches on sm_100a, so that what they include is
// emulated, and the neutral kernel that makes dscores. The quantisers are not here: their test includes them.
#include "cuda/instances/sm100/down_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/down_projection_fwd_mxfp8.cu"
#include "cuda/instances/sm100/projection_wgrad.cu"
#include "cuda/instances/sm100/up_projection_dgrad_mxfp8.cu"
#include "cuda/instances/sm100/up_projection_fwd_mxfp8.cu"
#include "cuda/plain/dscores.cu"
