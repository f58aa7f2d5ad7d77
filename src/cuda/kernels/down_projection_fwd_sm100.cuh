// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd on sm_100a: y = a @ w_down[e]^T + b_down[e], one row per (token, expert) pair.
// Compiled and emulated, never run on hardware.
// Shapes   a (R,n) bf16 in expert order, w_down (E,d,n) in any layout of WeightRows, y (R,d)
// Work     2*R*n*d FLOP; bytes: a 2*R*n, w_down 2*E*n*d, y 2*R*d
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), 128 rows by one CTA or 256 by a pair; two
//          accumulators in tensor memory, so that a tile is stored under the next one's k loop
//     warp 5     load     | fill s0 | fill s1 | ..              (wait empty, expect bytes at full)
//     warp 4     multiply | tile 0 k loop | tile 1 k loop | ..  (wait full, acc_empty; commit to empty, acc_full)
//     warps 0-3  epilogue |               | store tile 0  | ..  (wait acc_full; arrive acc_empty)
// Barriers full, empty, acc_full, acc_empty, work_full, work_empty: gemm/sm100/storage.cuh
// Numerics fp32 accumulate and bias, one rounding; bitwise repeatable: yes, as the order of k is fixed
// Requires what refuse() asks of the kernel for sm_90 (layer/select.cpp)     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/store_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

template <gemm::Major kMajor>
struct DownProjectionFwdSm100 {
  static constexpr gemm::GemmConfig gemm{.consumer_warpgroups = 1, .b = {.major = kMajor}};
};

// Pairs of CTAs have tiles of 256 rows, and each CTA loads half of the weights.
template <gemm::Major kMajor>
struct DownProjectionFwdSm100Pair {
  static constexpr gemm::GemmConfig gemm{.stages = 6,
                                         .consumer_warpgroups = 1,
                                         .b = {.major = kMajor},
                                         .cluster = {2, gemm::Sharing::kMulticast}};
};

struct DownProjectionFwdSm100Params {
  gemm::GemmParams gemm;
  gemm::StoreRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    down_projection_fwd_sm100(__grid_constant__ DownProjectionFwdSm100Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Epilogue = gemm::StoreRows<gemm::TensorMemoryCore<Config::gemm>>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_down_projection_fwd_sm100(DownProjectionFwdArguments const& args, int sm_count,
                                             cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, n = args.intermediate;
  DownProjectionFwdSm100Params p = {};
  cudaError_t error =
      host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_a, args.rows, n},
                                        .b = {args.w_down, {}},
                                        .n = d,
                                        .k = n,
                                        .gmem_offsets = args.gmem_expert_offsets,
                                        .segments = args.experts,
                                        .gmem_tile_counter = args.gmem_tile_counter});
  if (error == cudaSuccess) {
    error = host::make_ragged_store_map(p.epilogue.d, args.gmem_y, args.rows, 1, d, args.rows,
                                        gemm::kWarpSlabRows);
  }
  if (error != cudaSuccess) return error;
  p.epilogue.bias = {static_cast<gemm::bf16 const*>(args.b_down.gmem), args.b_down.expert_stride,
                     int(args.b_down.row_stride)};
  p.epilogue.columns = int(d);
  p.epilogue.ragged_extent = int(args.rows);
  return host::launch_persistent<down_projection_fwd_sm100<Config>>(
      host::persistent_shape<kGemm, gemm::SharedStorage<kGemm>>(),
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
