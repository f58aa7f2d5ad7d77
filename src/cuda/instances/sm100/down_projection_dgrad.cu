// SPDX-License-Identifier: Apache-2.0
#include "../../host/projection_sm100.hpp"
#include "../../kernels/down_projection_dgrad_sm100.cuh"

namespace tessera::cuda {

cudaError_t launch_down_projection_dgrad_sm100(DownProjectionDgradArguments const& args,
                                               int sm_count, cudaStream_t stream) {
  constexpr ActivationKind kKind = ActivationKind::swiglu;
  using Rows = DownProjectionDgradSm100<kKind, gemm::Major::kRows>;
  using KMajor = DownProjectionDgradSm100<kKind, gemm::Major::kK>;
  return args.w_down.column_stride == 1
             ? launch_down_projection_dgrad_sm100<Rows>(args, sm_count, stream)
             : launch_down_projection_dgrad_sm100<KMajor>(args, sm_count, stream);
}

}  // namespace tessera::cuda
