// SPDX-License-Identifier: Apache-2.0
#include "../../kernels/up_projection_dgrad_mxfp8.cuh"
#include "../../tuning/mxfp8.hpp"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {

cudaError_t launch_up_projection_dgrad_mxfp8(UpProjectionDgradMxfp8Arguments const& args,
                                             int sm_count, cudaStream_t stream) {
  using One = UpProjectionDgradMxfp8Config<1>;
  using Pair = UpProjectionDgradMxfp8Config<2>;
  return takes_pairs_sm100(args.rows, args.experts, sm_count)
             ? launch_up_projection_dgrad_mxfp8_config<Pair>(args, sm_count, stream)
             : launch_up_projection_dgrad_mxfp8_config<One>(args, sm_count, stream);
}

}  // namespace tessera::cuda
