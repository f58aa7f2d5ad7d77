// SPDX-License-Identifier: Apache-2.0
// The instances of down_projection_dgrad for one activation, chosen by the weights' layout.
#pragma once

#include "../kernels/down_projection_dgrad.cuh"
#include "../tuning/gemm_backward.hpp"

namespace tessera::cuda {

template <ActivationKind kKind>
cudaError_t launch_down_projection_dgrad_of(DownProjectionDgradArguments const& args, int sm_count,
                                            cudaStream_t stream) {
  using gemm::Boxes, gemm::Major;
  using Usual = DownProjectionDgradConfig<kKind, Major::kRows, Boxes::kTile>;
  using Wide = DownProjectionDgradConfig<kKind, Major::kRows, Boxes::kTile, TileWidth::k256>;
  using Rows = DownProjectionDgradConfig<kKind, Major::kRows, Boxes::kAny>;
  using Transposed = DownProjectionDgradConfig<kKind, Major::kK, Boxes::kAny>;
  int64_t const n = args.intermediate;
  bool const tiles = host::has_tile_map({transposed(args.w_down, n), {}}, 1, n);
  if constexpr (Activation{.kind = kKind}.gated()) {
    if (args.interleaved) {
      using Turned = DownProjectionDgradConfig<kKind, Major::kK, Boxes::kAny, TileWidth::k128,
                                               Columns::kInterleaved>;
      using WideTurned = DownProjectionDgradConfig<kKind, Major::kK, Boxes::kTile, TileWidth::k256,
                                                   Columns::kInterleaved>;
      return tiles && down_projection_dgrad_is_wide(n)
                 ? launch_down_projection_dgrad_config<WideTurned>(args, sm_count, stream)
                 : launch_down_projection_dgrad_config<Turned>(args, sm_count, stream);
    }
  }
  if (args.w_down.column_stride != 1) {
    return launch_down_projection_dgrad_config<Transposed>(args, sm_count, stream);
  }
  if (!tiles) {
    return launch_down_projection_dgrad_config<Rows>(args, sm_count, stream);
  }
  return down_projection_dgrad_is_wide(n)
             ? launch_down_projection_dgrad_config<Wide>(args, sm_count, stream)
             : launch_down_projection_dgrad_config<Usual>(args, sm_count, stream);
}

}  // namespace tessera::cuda
