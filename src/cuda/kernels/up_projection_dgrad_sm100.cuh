// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of sm_100a: dx row = dh @ w_up[e] [+ dl w_router[e]], one row per (token, expert) pair; the
// reduction runs over the gate half, then over the up half. The router's part is as on sm_90 (up_projection_dgrad.cuh).
// Compiled and emulated, never run on hardware.
// Shapes   dh (R,w*n) bf16 in expert order as [gate half | up half], w_up (E,w*n,d) in any layout of
//          WeightRows, dx rows (R,d); w = 2 for gated activations, 1 otherwise
// Work     2*w*R*n*d FLOP; bytes: dh 2*w*R*n, w_up 2*w*E*n*d, dx rows 2*R*d [, dl 4*R, w_router 2*E*d]
// Schedule that of down_projection_fwd_sm100.cuh, with a k loop through both halves
// Barriers full, empty, acc_full, acc_empty, work_full, work_empty: gemm/sm100/storage.cuh
// Numerics fp32 accumulate over both halves, then an FMA of dl and each term of w_router; one rounding; bitwise
//          repeatable: yes, as the order of k is fixed
// Requires what refuse() asks of the kernel for sm_90 (layer/select.cpp)     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/store_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/split_fp32.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

template <gemm::Major kMajor>
struct UpProjectionDgradSm100 {
  static constexpr gemm::GemmConfig gemm{.consumer_warpgroups = 1,
                                         .b = {.major = kMajor, .halves = gemm::Halves::kAlongK}};
};

// Pairs of CTAs have tiles of 256 rows, and each CTA loads half of the weights.
template <gemm::Major kMajor>
struct UpProjectionDgradSm100Pair {
  static constexpr gemm::GemmConfig gemm{.stages = 6,
                                         .consumer_warpgroups = 1,
                                         .b = {.major = kMajor, .halves = gemm::Halves::kAlongK},
                                         .cluster = {2, gemm::Sharing::kMulticast}};
};

struct UpProjectionDgradSm100Params {
  gemm::GemmParams gemm;
  gemm::StoreRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_dgrad_sm100(__grid_constant__ UpProjectionDgradSm100Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Epilogue = gemm::StoreRows<gemm::TensorMemoryCore<Config::gemm>, gemm::Adds::kOuterProduct>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_up_projection_dgrad_sm100(UpProjectionDgradArguments const& args, int sm_count,
                                             cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  static_assert(kGemm.k_halves() == 2);
  int64_t const d = args.hidden;
  UpProjectionDgradSm100Params p = {};
  cudaError_t error = host::gemm_params<kGemm>(
      p.gemm, {.a = {args.gmem_dh, args.rows},
               .b = {transposed(args.w_up[0], d), transposed(args.w_up[1], d)},
               .n = d,
               .k = args.intermediate,
               .k_halves = args.gated ? 2 : 1,
               .gmem_offsets = args.gmem_expert_offsets,
               .segments = args.experts,
               .gmem_tile_counter = args.gmem_tile_counter});
  if (error == cudaSuccess) {
    error = host::make_ragged_store_map(p.epilogue.d, args.gmem_dx_rows, args.rows, 1, d, args.rows,
                                        gemm::kWarpSlabRows);
  }
  if (error != cudaSuccess) return error;
  p.epilogue.outer = {
      .gmem_u = args.gmem_row_dlogits,
      .gmem_v = static_cast<gemm::bf16 const*>(args.w_router.gmem),
      .segment_stride = (args.router_in_terms ? kDgradTerms : 1) * args.w_router.pitch,
      .pitch = args.w_router.pitch,
      .terms = args.router_in_terms ? 2 : 1};
  p.epilogue.columns = int(d);
  p.epilogue.ragged_extent = int(args.rows);
  return host::launch_persistent<up_projection_dgrad_sm100<Config>>(
      host::persistent_shape<kGemm, gemm::SharedStorage<kGemm>>(),
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
