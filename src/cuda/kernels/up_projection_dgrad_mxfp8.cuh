// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of MXFP8 operands on sm_100a: dx row = rnd(dh8 w8_up[e]), one row per (token, expert) pair; the
// reduction runs over the gate half, then over the up half. The router's part of dx is not there.
// Compiled and emulated, never run on hardware.
// Shapes   dh8 (P,2n) e4m3 with scales (P,2n/32), w8_up transposed, (E,d,2n), with atoms of scales
//          (E,scale_atom_bytes(d, 2n/32)); dx rows (P,d) bf16
// Work     4*R*n*d FLOP; bytes: dh8 2*R*n, w8_up 2*E*n*d, dx rows 2*R*d, and 1/32 of the first two in scales
// Schedule that of down_projection_fwd_mxfp8.cuh, whose k is 2n here
// Barriers as there
// Numerics 32 products, scaled and added in fp32; one rounding; bitwise repeatable: yes
// Requires d, n multiples of 128; gated     Doc docs/kernels/blackwell.md
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
struct UpProjectionDgradMxfp8Params {
  gemm::MxGemmParams gemm;
  gemm::StoreRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    up_projection_dgrad_mxfp8(__grid_constant__ UpProjectionDgradMxfp8Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Epilogue = gemm::StoreRows<gemm::TensorMemoryCore<Config::gemm>>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_up_projection_dgrad_mxfp8_config(UpProjectionDgradMxfp8Arguments const& args,
                                                    int sm_count, cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const n = args.hidden, k = 2 * args.intermediate;
  if (args.hidden % kMxTile != 0 || args.intermediate % kMxTile != 0) return cudaErrorInvalidValue;
  UpProjectionDgradMxfp8Params p;
  p.gemm.scales = {.gmem_a = static_cast<uint8_t const*>(args.gmem_dh_scales),
                   .gmem_b = static_cast<uint8_t const*>(args.gmem_w_up_t_scales),
                   .b_matrix_bytes = scale_atom_bytes(n, k / gemm::kMxBlock)};
  p.epilogue = {};
  p.epilogue.columns = int(n);
  p.epilogue.ragged_extent = int(args.rows);
  cudaError_t error =
      host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_dh, args.rows, k},
                                        .b = {{.gmem = args.gmem_w_up_t}, {}},
                                        .n = n,
                                        .k = k,
                                        .gmem_offsets = args.gmem_expert_offsets,
                                        .segments = args.experts,
                                        .gmem_tile_counter = args.gmem_tile_counter});
  if (error == cudaSuccess) {
    error = host::make_ragged_store_map(p.epilogue.d, args.gmem_dx_rows, args.rows, 1, n, args.rows,
                                        gemm::kWarpSlabRows);
  }
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_dgrad_mxfp8<Config>>(
      {gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
       int(sizeof(gemm::SharedStorage<kGemm>))},
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
