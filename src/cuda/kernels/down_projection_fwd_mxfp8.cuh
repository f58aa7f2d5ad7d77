// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of MXFP8 operands on sm_100a: y = rnd(a8 w8_down[e]^T), one row per (token, expert) pair.
// Compiled and emulated, never run on hardware.
// Shapes   a8 (P,n) e4m3 with scales (P,n/32), w8_down (E,d,n) with atoms of scales (E,scale_atom_bytes(d, n/32)); y
//          (P,d) bf16
// Work     2*R*n*d FLOP; bytes: a8 R*n, w8_down E*n*d, y 2*R*d, and 1/32 of the first two in scales
// Schedule that of up_projection_fwd_mxfp8.cuh; rows of a8 lie in the order of experts, and are copied as gathered ones
//          are, since their scales have to be: a tile may begin at any row
// Barriers as there
// Numerics 32 products, scaled and added in fp32; one rounding; bitwise repeatable: yes
// Requires d, n multiples of 128; no bias     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/store_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/mxfp8.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct DownProjectionFwdMxfp8Params {
  gemm::MxGemmParams gemm;
  gemm::StoreRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    down_projection_fwd_mxfp8(__grid_constant__ DownProjectionFwdMxfp8Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Epilogue = gemm::StoreRows<gemm::TensorMemoryCore<Config::gemm>>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_down_projection_fwd_mxfp8_config(DownProjectionFwdMxfp8Arguments const& args,
                                                    int sm_count, cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const n = args.hidden, k = args.intermediate;
  if (args.hidden % kMxTile != 0 || args.intermediate % kMxTile != 0) return cudaErrorInvalidValue;
  DownProjectionFwdMxfp8Params p;
  p.gemm.scales = {.gmem_a = static_cast<uint8_t const*>(args.gmem_a_scales),
                   .gmem_b = static_cast<uint8_t const*>(args.gmem_w_down_scales),
                   .b_matrix_bytes = scale_atom_bytes(n, k / gemm::kMxBlock)};
  p.epilogue = {};
  p.epilogue.columns = int(n);
  p.epilogue.ragged_extent = int(args.rows);
  cudaError_t error =
      host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_a, args.rows, k},
                                        .b = {{.gmem = args.gmem_w_down}, {}},
                                        .n = n,
                                        .k = k,
                                        .gmem_offsets = args.gmem_expert_offsets,
                                        .segments = args.experts,
                                        .gmem_tile_counter = args.gmem_tile_counter});
  if (error == cudaSuccess) {
    error = host::make_ragged_store_map(p.epilogue.d, args.gmem_y, args.rows, 1, n, args.rows,
                                        gemm::kWarpSlabRows);
  }
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_fwd_mxfp8<Config>>(
      {gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
       int(sizeof(gemm::SharedStorage<kGemm>))},
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
