// SPDX-License-Identifier: Apache-2.0
// The instances of sm_100a, as a library would have them: included, so that what they include is emulated.
#include "cuda/instances/sm100/down_projection_fwd.cu"
#include "cuda/instances/sm100/up_projection_fwd.cu"
#include "cuda/instances/sm100/up_projection_fwd_gated.cu"
#include "cuda/instances/sm100/up_projection_fwd_swiglu.cu"
#include "cuda/instances/sm100/up_projection_fwd_ungated.cu"
