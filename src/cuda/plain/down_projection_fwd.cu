// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd, plainly: see down_projection_fwd.cuh.
#include "down_projection_fwd.cuh"

namespace tessera::cuda {

cudaError_t launch_down_projection_fwd_plain(DownProjectionFwdArguments const& args,
                                             cudaStream_t stream) {
  return plain::launch(&down_projection_fwd_plain<__nv_bfloat16>, args.rows * args.hidden, stream,
                       args);
}

}  // namespace tessera::cuda
