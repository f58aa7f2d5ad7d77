// SPDX-License-Identifier: Apache-2.0
#include "../kernels/up_projection_dgrad.cuh"
#include "../tuning/gemm_backward.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor, RouterPart kRouterPart>
cudaError_t launch_of(UpProjectionDgradArguments const& args, int sm_count, cudaStream_t stream) {
  using Whole = UpProjectionDgradConfig<kMajor, kRouterPart>;
  using PartialLast = UpProjectionDgradConfig<kMajor, kRouterPart, gemm::Tail::kPartial>;
  return Whole::gemm.last_is_partial(args.hidden)
             ? launch_up_projection_dgrad_config<PartialLast>(args, sm_count, stream)
             : launch_up_projection_dgrad_config<Whole>(args, sm_count, stream);
}

template <gemm::Major kMajor>
cudaError_t launch_of(UpProjectionDgradArguments const& args, int sm_count, cudaStream_t stream) {
  return args.gmem_row_dlogits != nullptr
             ? launch_of<kMajor, RouterPart::kAdded>(args, sm_count, stream)
             : launch_of<kMajor, RouterPart::kNone>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_up_projection_dgrad(UpProjectionDgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  using gemm::Major;
  if (args.rows == 0) return cudaSuccess;
  return args.w_up[0].column_stride == 1 ? launch_of<Major::kRows>(args, sm_count, stream)
                                         : launch_of<Major::kK>(args, sm_count, stream);
}

}  // namespace tessera::cuda
