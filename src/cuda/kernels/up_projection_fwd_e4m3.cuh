// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of e4m3 operands: hb = rnd(x8[gather_index] w8_up[e]^T), a = act(hb); for backward hb is stored as
// codes with scales, as is a for down_projection_fwd; or both in bf16.
// Shapes   x8 (T,d) e4m3 with scales (T,d/128); w8_up (E,2,n,d) e4m3 with scales (E,n/128,d/128,2); h8 (R,2n), a8 (R,n)
//          with scales of 1 x 128 along their rows
// Work     4*R*n*d FLOP; bytes: x8 T*d..R*d, w8_up 2*E*n*d, h8 2*R*n, a8 R*n, and 1/32 of them in scales; compute bound
//          from n = 512 on (333 FLOP per byte is the balance point)
// Schedule as up_projection_fwd: persistent, 1 CTA/SM, tiles of 128 x (128 gate, 128 up)
//   WG0 producer    | fill s0 | fill s1 | fill s2 | next tile: fill s0           (wait empty, arrive full)
//   WG1,2 consumers |         | group 0, promote, group 1, promote | .. | hold hb  (wait full, arrive empty)
//   WG3 stores      | activation, largest magnitudes, codes, stores of the held tile  (wait held, arrive stored)
//   fill = TMA w8_up + cp.async of rows of x8, of their scales and of two of w8_up
// Barriers full, empty [stages] and those of the scheduler: arrival counts in gemm/config.hpp; held, stored: one for
//          each consumer warp, one arrival
// Numerics 128 products in the tensor cores (13 fraction bits), then fp32, one FMA for each 128 of k; hb rounded once;
//          a8 from act(hb) in fp32; bitwise repeatable: yes
// Requires d, n multiples of 128; K-major w8_up as quantise_weights() gives it; no bias
#pragma once

#include "../epilogue/activation_e4m3.cuh"
#include "../gemm/sm90/roles_scaled.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/low_precision.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`, `ActivationKind activation`, `gemm::Element out`.
struct UpProjectionFwdE4m3Params {
  gemm::GemmParams gemm;
  gemm::ScaleParams scales;
  gemm::ActivationE4m3Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_fwd_e4m3(__grid_constant__ UpProjectionFwdE4m3Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue =
      gemm::ActivationE4m3Epilogue<gemm::sm90::Core<Config::gemm>, Config::activation, Config::out>;
  gemm::run_scaled_gemm<Config::gemm, Epilogue>(p.gemm, p.scales, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_up_projection_fwd_e4m3_params(UpProjectionFwdE4m3Params& p,
                                               UpProjectionFwdE4m3Arguments const& args) {
  int64_t const d = args.hidden, n = args.intermediate;
  if (d % gemm::kScaleBlock != 0 || n % gemm::kScaleBlock != 0) return cudaErrorInvalidValue;
  p.scales = {.gmem_a = args.gmem_x_scales,
              .a_row_step = d / gemm::kScaleBlock,
              .a_k_step = 1,
              .gmem_b = args.gmem_w_up_scales,
              .b_blocks = 0};
  p.epilogue = {.gmem_h = args.gmem_h,
                .gmem_a = args.gmem_a,
                .gmem_h_scales = args.gmem_h_scales,
                .gmem_a_scales = args.gmem_a_scales,
                .scale_pitch = padded_scale_rows(args.rows),
                .activation = args.activation,
                .columns = int(n)};
  return host::gemm_params<Config::gemm>(p.gemm, {.a = {args.gmem_x, args.rows, d},
                                                  .gmem_index = args.gmem_gather_index,
                                                  .b = {{.gmem = args.gmem_w_up}, {}},
                                                  .n = n,
                                                  .k = d,
                                                  .gmem_offsets = args.gmem_expert_offsets,
                                                  .total_rows = args.rows,
                                                  .segments = args.experts,
                                                  .gmem_tile_counter = args.gmem_tile_counter});
}

template <class Config>
cudaError_t launch_up_projection_fwd_e4m3_config(UpProjectionFwdE4m3Arguments const& args,
                                                 int sm_count, cudaStream_t stream) {
  UpProjectionFwdE4m3Params params;
  cudaError_t const error = make_up_projection_fwd_e4m3_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_fwd_e4m3<Config>>(
      host::persistent_shape<Config::gemm, gemm::ScaledStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
