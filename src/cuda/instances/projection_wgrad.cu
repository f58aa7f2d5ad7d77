// SPDX-License-Identifier: Apache-2.0
#include "../kernels/projection_wgrad.cuh"
#include "../tuning/gemm_backward.hpp"

namespace tessera::cuda {
namespace {

template <gemm::Major kMajor, Gradient kGradient>
cudaError_t launch(WgradArguments const& args, int sm_count, cudaStream_t stream) {
  using gemm::Boxes;
  auto const with = [&]<class Config>(Config) {
    return launch_projection_wgrad_config<Config>(args, sm_count, stream);
  };
  if (args.intermediate % gemm::kGroupRows != 0) {
    return with(ProjectionWgradConfig<kMajor, kGradient, Boxes::kAny>{});
  }
  if constexpr (kGradient == Gradient::kBf16) {
    if (args.accumulates)
      return with(ProjectionWgradConfig<kMajor, Gradient::kAddedToBf16, Boxes::kTile>{});
    if (!host::alike(args.dw)) return with(ProjectionWgradConfig<kMajor, kGradient, Boxes::kAny>{});
  }
  if (projection_wgrad_in_pairs(args.hidden, sm_count)) {
    return with(
        ProjectionWgradConfig<kMajor, kGradient, Boxes::kTile, gemm::Sharing::kMulticast>{});
  }
  return with(ProjectionWgradConfig<kMajor, kGradient, Boxes::kTile>{});
}

template <gemm::Major kMajor>
cudaError_t launch(WgradArguments const& args, int sm_count, cudaStream_t stream) {
  return args.is_fp32 ? launch<kMajor, Gradient::kFp32>(args, sm_count, stream)
                      : launch<kMajor, Gradient::kBf16>(args, sm_count, stream);
}

cudaError_t launch(WgradArguments const& args, int sm_count, cudaStream_t stream) {
  using gemm::Major;
  WeightRows const& dw = args.dw[0].gmem != nullptr ? args.dw[0] : args.dw[1];
  return dw.column_stride == 1 ? launch<Major::kK>(args, sm_count, stream)
                               : launch<Major::kRows>(args, sm_count, stream);
}

}  // namespace

cudaError_t launch_down_projection_wgrad(DownProjectionWgradArguments const& args, int sm_count,
                                         cudaStream_t stream) {
  return launch(args, sm_count, stream);
}

cudaError_t launch_up_projection_wgrad(UpProjectionWgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  return launch(args, sm_count, stream);
}

}  // namespace tessera::cuda
