// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of e4m3 operands: y = rnd(a8 w8_down[e]^T), from the codes and scales of up_projection_fwd_e4m3.
// Shapes   a8 (R,n) e4m3 with scales (n/128,P4); w8_down (E,d,n) e4m3 with scales (E,d/128,n/128); y (R,d) bf16
// Work     2*R*n*d FLOP; bytes: a8 R*n, w8_down E*d*n, y 2*R*d, and 1/32 of the first two in scales; from n = 1024 on
//          compute bound, below bound by y
// Schedule as up_projection_fwd_e4m3, of tiles of 128 x 256; rows of a8 are sorted, and are copied by cp.async as well,
//          each thread's with its scale: rows of an expert begin anywhere, where no copy of 128 scales may
// Barriers as there
// Numerics 128 products in the tensor cores (13 fraction bits), then fp32, one FMA for each 128 of n; one rounding;
//          bitwise repeatable: yes
// Requires d, n multiples of 128; w8_down as quantise_weights() gives it; no bias
#pragma once

#include "../epilogue/store_held.cuh"
#include "../gemm/sm90/roles_scaled.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/low_precision.hpp"

namespace tessera::cuda {

static_assert(kScaleBlock == gemm::kScaleBlock);

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct DownProjectionFwdE4m3Params {
  gemm::GemmParams gemm;
  gemm::ScaleParams scales;
  gemm::StoreHeldParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    down_projection_fwd_e4m3(__grid_constant__ DownProjectionFwdE4m3Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = gemm::StoreHeld<gemm::sm90::Core<Config::gemm>>;
  gemm::run_scaled_gemm<Config::gemm, Epilogue>(p.gemm, p.scales, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_down_projection_fwd_e4m3_params(DownProjectionFwdE4m3Params& p,
                                                 DownProjectionFwdE4m3Arguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, n = args.intermediate;
  if (d % gemm::kScaleBlock != 0 || n % gemm::kScaleBlock != 0) return cudaErrorInvalidValue;
  p.scales = {.gmem_a = args.gmem_a_scales,
              .a_row_step = 1,
              .a_k_step = padded_scale_rows(args.rows),
              .gmem_b = args.gmem_w_down_scales,
              .b_blocks = int(d / gemm::kScaleBlock)};
  p.epilogue = {static_cast<gemm::bf16*>(args.gmem_y), int(d)};
  return host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_a, args.rows, n},
                                           .b = {{.gmem = args.gmem_w_down}, {}},
                                           .n = d,
                                           .k = n,
                                           .gmem_offsets = args.gmem_expert_offsets,
                                           .total_rows = args.rows,
                                           .segments = args.experts,
                                           .gmem_tile_counter = args.gmem_tile_counter});
}

template <class Config>
cudaError_t launch_down_projection_fwd_e4m3_config(DownProjectionFwdE4m3Arguments const& args,
                                                   int sm_count, cudaStream_t stream) {
  DownProjectionFwdE4m3Params params;
  cudaError_t const error = make_down_projection_fwd_e4m3_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_fwd_e4m3<Config>>(
      host::persistent_shape<Config::gemm, gemm::ScaledStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
