// SPDX-License-Identifier: Apache-2.0
#include "../../kernels/down_projection_dgrad_mxfp8.cuh"
#include "../../tuning/mxfp8.hpp"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {

cudaError_t launch_down_projection_dgrad_mxfp8(DownProjectionDgradMxfp8Arguments const& args,
                                               int sm_count, cudaStream_t stream) {
  using One = DownProjectionDgradMxfp8Config<ActivationKind::swiglu, 1>;
  using Pair = DownProjectionDgradMxfp8Config<ActivationKind::swiglu, 2>;
  return takes_pairs_sm100(args.rows, args.experts, sm_count)
             ? launch_down_projection_dgrad_mxfp8_config<Pair>(args, sm_count, stream)
             : launch_down_projection_dgrad_mxfp8_config<One>(args, sm_count, stream);
}

}  // namespace tessera::cuda
