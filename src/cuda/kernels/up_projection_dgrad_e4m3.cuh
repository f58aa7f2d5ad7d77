// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of e4m3 operands: dx row = rnd(dh8 w8_up[e]) [, rnd(that + dl w_router[e])], one row per (token,
// expert) pair; the reduction runs over the gate half, then over the up half.
// Shapes   dh8 (P,2n) e4m3 with scales (2n/128,P4); w8_up transposed, (E,d,2n), with scales (E,d/128,2n/128); dx rows
//          (P,d) bf16 [; dl (P) fp32, w_router (E,d) bf16, or (3E,d), terms of an fp32 one]
// Work     4*R*n*d FLOP; bytes: dh8 2*R*n, w8_up 2*E*n*d, dx rows 2*R*d, and 1/32 of the first two in scales; from
//          n = 512 on compute bound, below bound by dx rows
// Schedule as down_projection_fwd_e4m3, whose k is 2n here
// Barriers as there
// Numerics 128 products in the tensor cores (13 fraction bits), then fp32, one FMA for each 128 of k; one rounding, and
//          another behind the router's part; bitwise repeatable: yes
// Requires d, n multiples of 128; w8_up as quantise_weights() transposes it
#pragma once

#include <type_traits>

#include "../epilogue/store_held.cuh"
#include "../epilogue/store_held_outer_product.cuh"
#include "../gemm/sm90/roles_scaled.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/low_precision.hpp"
#include "../host/split_fp32.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `bool router_part`.
template <class Config>
struct UpProjectionDgradE4m3Params {
  using Core = gemm::sm90::Core<Config::gemm>;
  using Epilogue = std::conditional_t<Config::router_part, gemm::StoreHeldOuterProduct<Core>,
                                      gemm::StoreHeld<Core>>;
  gemm::GemmParams gemm;
  gemm::ScaleParams scales;
  typename Epilogue::Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_dgrad_e4m3(__grid_constant__ UpProjectionDgradE4m3Params<Config> const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = typename UpProjectionDgradE4m3Params<Config>::Epilogue;
  gemm::run_scaled_gemm<Config::gemm, Epilogue>(p.gemm, p.scales, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_up_projection_dgrad_e4m3_params(UpProjectionDgradE4m3Params<Config>& p,
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
  p.epilogue = {};
  p.epilogue.gmem_d = static_cast<gemm::bf16*>(args.gmem_dx_rows);
  p.epilogue.columns = int(d);
  if constexpr (Config::router_part) {
    p.epilogue.gmem_u = args.gmem_row_dlogits;
    p.epilogue.gmem_v = static_cast<gemm::bf16 const*>(args.w_router.gmem);
    p.epilogue.v_pitch = args.w_router.pitch;
    p.epilogue.v_rows = args.router_in_terms ? kDgradTerms : 1;
  }
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
  UpProjectionDgradE4m3Params<Config> params;
  cudaError_t const error = make_up_projection_dgrad_e4m3_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_dgrad_e4m3<Config>>(
      host::persistent_shape<Config::gemm, gemm::ScaledStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
