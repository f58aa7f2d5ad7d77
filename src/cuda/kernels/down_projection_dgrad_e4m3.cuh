// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of e4m3 operands: t = dO8[gather_index] w8_down[e] stays in the SM; with s the row's score and
// h the values of h8
//   ds partial = <t, act(h)>,  dh = rnd(J_act(h)^T s t), as bf16 and as codes of that,  a' = rnd(s act(h))
// Shapes   dO8 (T,d) e4m3 with scales (T,d/128); w8_down transposed, (E,n,d), with scales (E,n/128,d/128); h8 and dh8
//          (P,2n) e4m3 with scales (2n/128,P4); dh (P,2n), a' (P,n) bf16; ds partials (P,n/128) fp32
// Work     2*R*n*d FLOP; bytes: dO8 T*d..R*d, w8_down E*n*d, h8 2*R*n, dh 4*R*n, dh8 2*R*n, a' 2*R*n, and 1/32 of those
//          of codes in scales; bound by bytes up to d = 1700, by the tensor cores above
// Schedule as up_projection_fwd_e4m3, of tiles of 128 x 256 of t
//   WG0 producer    | fill s0 | fill s1 | fill s2 | next tile: fill s0           (wait empty, arrive full)
//   WG1,2 consumers |         | group 0, promote, group 1, promote | .. | hold t   (wait full, arrive empty)
//   WG3 stores      | ask for numbers of the next tile, codes of h two pieces ahead | derivative, codes, stores
//                   |                                                          (wait held, arrive stored)
// Barriers as there
// Numerics 128 products in the tensor cores (13 fraction bits), then fp32, one FMA for each 128 of d; t rounded once to
//          bf16, what is stored once more; ds in fp32 over 128 columns; bitwise repeatable: yes
// Requires d, n multiples of 128; w8_down as quantise_weights() transposes it; no bias. dh8 may lie over h8
#pragma once

#include <limits>

#include "../epilogue/activation_gradient_e4m3.cuh"
#include "../gemm/sm90/roles_scaled.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/low_precision.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `ActivationKind activation`.
struct DownProjectionDgradE4m3Params {
  gemm::GemmParams gemm;
  gemm::ScaleParams scales;
  gemm::ActivationGradientE4m3Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    down_projection_dgrad_e4m3(__grid_constant__ DownProjectionDgradE4m3Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue =
      gemm::ActivationGradientE4m3Epilogue<gemm::sm90::Core<Config::gemm>, Config::activation>;
  gemm::run_scaled_gemm<Config::gemm, Epilogue>(p.gemm, p.scales, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_down_projection_dgrad_e4m3_params(DownProjectionDgradE4m3Params& p,
                                                   DownProjectionDgradE4m3Arguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, n = args.intermediate;
  if (d % gemm::kScaleBlock != 0 || n % gemm::kScaleBlock != 0) return cudaErrorInvalidValue;
  auto const none_of = [](void const* output) {
    return output == nullptr ? std::numeric_limits<int>::max() : 0;
  };
  p.scales = {.gmem_a = args.gmem_d_o_scales,
              .a_row_step = d / gemm::kScaleBlock,
              .a_k_step = 1,
              .gmem_b = args.gmem_w_down_t_scales,
              .b_blocks = int(n / gemm::kScaleBlock)};
  p.epilogue = {.gmem_h = static_cast<uint8_t const*>(args.gmem_h),
                .gmem_h_scales = args.gmem_h_scales,
                .gmem_scores = args.gmem_scores,
                .gmem_permutation = args.gmem_sort_permutation,
                .gmem_dh = static_cast<gemm::bf16*>(args.gmem_dh),
                .gmem_dh8 = static_cast<uint8_t*>(args.gmem_dh8),
                .gmem_dh8_scales = args.gmem_dh8_scales,
                .gmem_a_scaled = static_cast<gemm::bf16*>(args.gmem_a_scaled),
                .gmem_partials = args.gmem_ds_partials,
                .scale_pitch = padded_scale_rows(args.rows),
                .activation = args.activation,
                .columns = int(n),
                .none_of_dh = none_of(args.gmem_dh),
                .none_of_dh8 = none_of(args.gmem_dh8),
                .none_of_a_scaled = none_of(args.gmem_a_scaled)};
  return host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_d_o, args.rows, d},
                                           .gmem_index = args.gmem_gather_index,
                                           .b = {{.gmem = args.gmem_w_down_t}, {}},
                                           .n = n,
                                           .k = d,
                                           .gmem_offsets = args.gmem_expert_offsets,
                                           .total_rows = args.rows,
                                           .segments = args.experts,
                                           .gmem_tile_counter = args.gmem_tile_counter});
}

template <class Config>
cudaError_t launch_down_projection_dgrad_e4m3_config(DownProjectionDgradE4m3Arguments const& args,
                                                     int sm_count, cudaStream_t stream) {
  DownProjectionDgradE4m3Params params;
  cudaError_t const error = make_down_projection_dgrad_e4m3_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_dgrad_e4m3<Config>>(
      host::persistent_shape<Config::gemm, gemm::ScaledStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
