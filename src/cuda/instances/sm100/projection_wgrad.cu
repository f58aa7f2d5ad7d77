// SPDX-License-Identifier: Apache-2.0
#include "../../host/projection_sm100.hpp"
#include "../../kernels/projection_wgrad_sm100.cuh"
#include "../../tuning/sm100.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor>
cudaError_t launch(WgradArguments const& args, int sm_count, cudaStream_t stream) {
  using Fp32 = ProjectionWgradSm100<kMajor, true>;
  using Bf16 = ProjectionWgradSm100<kMajor, false>;
  using Fp32Pair = ProjectionWgradSm100Pair<kMajor, true>;
  using Bf16Pair = ProjectionWgradSm100Pair<kMajor, false>;
  if (wgrad_takes_pairs_sm100(args.hidden, sm_count)) {
    return args.is_fp32 ? launch_projection_wgrad_sm100<Fp32Pair>(args, sm_count, stream)
                        : launch_projection_wgrad_sm100<Bf16Pair>(args, sm_count, stream);
  }
  return args.is_fp32 ? launch_projection_wgrad_sm100<Fp32>(args, sm_count, stream)
                      : launch_projection_wgrad_sm100<Bf16>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_projection_wgrad_sm100(WgradArguments const& args, int sm_count,
                                          cudaStream_t stream) {
  WeightRows const& dw = args.dw[0].gmem != nullptr ? args.dw[0] : args.dw[1];
  return dw.column_stride == 1 ? launch<gemm::Major::kK>(args, sm_count, stream)
                               : launch<gemm::Major::kRows>(args, sm_count, stream);
}

}  // namespace tessera::cuda
