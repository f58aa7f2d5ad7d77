// SPDX-License-Identifier: Apache-2.0
// The instances of up_projection_fwd for one activation, chosen by loader and by the weights' layout.
#pragma once

#include "../kernels/up_projection_fwd.cuh"
#include "../tuning/gemm.hpp"

namespace tessera::cuda {

template <ActivationKind kKind, gemm::Major kMajor>
cudaError_t launch_up_projection_fwd_of(UpProjectionFwdArguments const& args, int sm_count,
                                        cudaStream_t stream) {
  using gemm::Boxes, gemm::Loader;
  using Sorted = UpProjectionFwdConfig<kKind, Loader::kTma, kMajor, Boxes::kAny>;
  using GatheredTile = UpProjectionFwdConfig<kKind, Loader::kGather, kMajor, Boxes::kTile>;
  using Gathered = UpProjectionFwdConfig<kKind, Loader::kGather, kMajor, Boxes::kAny>;
  if (args.gmem_gather_index == nullptr) {
    return launch_up_projection_fwd_config<Sorted>(args, sm_count, stream);
  }
  int const halves = args.activation.gated() ? 2 : 1;
  return host::has_tile_map(args.w_up, halves, args.intermediate)
             ? launch_up_projection_fwd_config<GatheredTile>(args, sm_count, stream)
             : launch_up_projection_fwd_config<Gathered>(args, sm_count, stream);
}

template <ActivationKind kKind>
cudaError_t launch_up_projection_fwd_of(UpProjectionFwdArguments const& args, int sm_count,
                                        cudaStream_t stream) {
  using gemm::Boxes, gemm::Loader, gemm::Major;
  if constexpr (Activation{.kind = kKind}.gated()) {
    if (args.interleaved) {
      using Sorted = UpProjectionFwdConfig<kKind, Loader::kTma, Major::kRows, Boxes::kAny,
                                           Columns::kInterleaved>;
      using Gathered = UpProjectionFwdConfig<kKind, Loader::kGather, Major::kRows, Boxes::kAny,
                                             Columns::kInterleaved>;
      return args.gmem_gather_index == nullptr
                 ? launch_up_projection_fwd_config<Sorted>(args, sm_count, stream)
                 : launch_up_projection_fwd_config<Gathered>(args, sm_count, stream);
    }
  }
  return args.w_up[0].column_stride == 1
             ? launch_up_projection_fwd_of<kKind, Major::kK>(args, sm_count, stream)
             : launch_up_projection_fwd_of<kKind, Major::kRows>(args, sm_count, stream);
}

}  // namespace tessera::cuda
