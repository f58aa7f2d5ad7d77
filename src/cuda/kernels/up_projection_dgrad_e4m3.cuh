// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of e4m3 operands: dx row = rnd(dh8 w8_up[e]), one row per (token, expert) pair; the reduction
// runs over the gate half, then over the up half. The router's part of dx is router_dgrad's: added here, by the
// warpgroup that stores, it took longer (docs/notebook/2026-11-28-fp8-layer.md).
// Shapes   dh8 (P,2n) e4m3 with scales (2n/128,P4); w8_up transposed, (E,d,2n), with scales (E,d/128,2n/128); dx rows
//          (P,d) bf16
// Work     4*R*n*d FLOP; bytes: dh8 2*R*n, w8_up 2*E*n*d, dx rows 2*R*d, and 1/32 of the first two in scales; from
//          n = 512 on compute bound, below bound by dx rows
// Schedule as down_projection_fwd_e4m3, whose k is 2n here
// Barriers as there
// Numerics 128 products in the tensor cores (13 fraction bits), then fp32, one FMA for each 128 of k; one rounding;
//          bitwise repeatable: yes
// Requires d, n multiples of 128; w8_up as quantise_weights() transposes it
#pragma once

#include "../epilogue/store_held.cuh"
#include "../gemm/sm90/roles_scaled.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/low_precision.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct UpProjectionDgradE4m3Params {
  gemm::GemmParams gemm;
  gemm::ScaleParams scales;
  gemm::StoreHeldParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_dgrad_e4m3(__grid_constant__ UpProjectionDgradE4m3Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = gemm::StoreHeld<gemm::sm90::Core<Config::gemm>>;
  gemm::run_scaled_gemm<Config::gemm, Epilogue>(p.gemm, p.scales, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_up_projection_dgrad_e4m3_params(UpProjectionDgradE4m3Params& p,
                                                 UpProjectionDgradE4m3Arguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, k = 2 * args.intermediate;
  if (d % gemm::kScaleBlock != 0 || args.intermediate % gemm::kScaleBlock != 0) {
    return cudaErrorInvalidValue;
  }
  p.scales = {.gmem_a = args.gmem_dh_scales,
              .a_row_step = 1,
              .a_k_step = padded_scale_rows(args.rows),
              .gmem_b = args.gmem_w_up_t_scales,
              .b_blocks = int(d / gemm::kScaleBlock)};
  p.epilogue = {.gmem_d = static_cast<gemm::bf16*>(args.gmem_dx_rows), .columns = int(d)};
  return host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_dh, args.rows, k},
                                           .b = {{.gmem = args.gmem_w_up_t}, {}},
                                           .n = d,
                                           .k = k,
                                           .gmem_offsets = args.gmem_expert_offsets,
                                           .total_rows = args.rows,
                                           .segments = args.experts,
                                           .gmem_tile_counter = args.gmem_tile_counter});
}

template <class Config>
cudaError_t launch_up_projection_dgrad_e4m3_config(UpProjectionDgradE4m3Arguments const& args,
                                                   int sm_count, cudaStream_t stream) {
  UpProjectionDgradE4m3Params params;
  cudaError_t const error = make_up_projection_dgrad_e4m3_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_dgrad_e4m3<Config>>(
      host::persistent_shape<Config::gemm, gemm::ScaledStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
