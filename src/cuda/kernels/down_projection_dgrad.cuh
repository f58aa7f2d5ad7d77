// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad: t = dO[gather_index] @ w_down[e] stays in registers; with s the row's score,
//   ds partial = <t, act(h)>,  dh = J_act(h)^T (s t),  a' = s act(h)
// Shapes   dO (T,d) bf16, w_down (E,d,n) in any layout of WeightRows, h and dh (R,w*n) as [gate half | up
//          half], a' (R,n), ds partials (R, n/128) fp32; w = 2 for gated activations, 1 otherwise
// Work     2*R*n*d FLOP; bytes: dO T*d..R*d, w_down E*n*d, h w*R*n, dh w*R*n, a' R*n, 2 each
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile); ping-pong, drawn here, or cooperative
//          (tuning/gemm_backward.hpp): the epilogue reads and writes five slabs for every two multiplied
//   WG0     | fill stages: cp.async gather of dO + TMA w_down      (wait empty, arrive full)
//   WG1     | load h of blocks 0, 1 | mma tile 0 | differentiate, load h | load h | mma tile 2
//   WG2     |                 (turn)             | mma tile 1            | differentiate ..
// Barriers full, empty [stages], loads [2] per consumer, the turn, and named ones: gemm/config.hpp
//   rows of dO that a kernel beside this one still brings: gemm/await_rows.cuh
// Numerics fp32 accumulate, activation recomputed in fp32, one rounding per stored value; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include <type_traits>

#include "../arch/dependent_launch.cuh"
#include "../epilogue/activation_gradient.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

static_assert(kScoreGroup == gemm::kGroupColumns);

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `ActivationKind activation`.
struct DownProjectionDgradParams {
  gemm::GemmParams gemm;
  gemm::ActivationGradientParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    down_projection_dgrad(__grid_constant__ DownProjectionDgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  arch::let_next_kernel_start();  // down_projection_wgrad; this kernel never starts early
  using Core = gemm::sm90::Core<Config::gemm>;
  using Epilogue = std::conditional_t<
      (Config::gemm.epilogue.lent_stages > 0),
      gemm::ActivationGradientInStages<Core, Config::activation, Config::interleaved>,
      gemm::ActivationGradientEpilogue<Core, Config::activation, Config::interleaved>>;
  gemm::run_gemm<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_down_projection_dgrad_params(DownProjectionDgradParams& p,
                                              DownProjectionDgradArguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  static_assert(kGemm.gathers() && kGemm.block_m() == core::kReadyRows);
  int64_t const n = args.intermediate;
  int const halves = args.activation.gated() && !Config::interleaved ? 2 : 1;
  int64_t const h_columns = Config::interleaved ? 2 * n : n;  // of a half
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p = {};
  then(host::gemm_params<kGemm>(p.gemm, {.a = args.d_o,
                                         .gmem_index = args.gmem_gather_index,
                                         .b = {transposed(args.w_down, n), {}},
                                         .n = n,
                                         .k = args.hidden,
                                         .gmem_offsets = args.gmem_expert_offsets,
                                         .segments = args.experts,
                                         .gmem_tile_counter = args.gmem_tile_counter,
                                         .gmem_handover = args.gmem_handover,
                                         .awaited = args.awaited}));
  then(host::make_halves_map(p.epilogue.h, args.gmem_h, args.rows, halves, h_columns,
                             kGemm.epilogue.lent_stages > 0 ? kGemm.tile.m : gemm::kWarpRows));
  then(host::make_ragged_store_map(p.epilogue.dh, args.gmem_dh, args.rows, halves, h_columns,
                                   args.rows, gemm::kWarpRows));
  if (args.gmem_a_scaled != nullptr) {
    then(host::make_ragged_store_map(p.epilogue.a_scaled, args.gmem_a_scaled, args.rows, 1, n,
                                     args.rows, gemm::kWarpRows));
  }
  p.epilogue.gmem_partials = args.gmem_ds_partials;
  p.epilogue.gmem_scores = args.gmem_scores;
  p.epilogue.gmem_permutation = args.gmem_sort_permutation;
  p.epilogue.activation = args.activation;
  p.epilogue.groups = int(score_groups(n));
  p.epilogue.ragged_extent = int(args.rows);
  p.epilogue.stores_a = args.gmem_a_scaled != nullptr;
  return error;
}

template <class Config>
cudaError_t launch_down_projection_dgrad_config(DownProjectionDgradArguments const& args,
                                                int sm_count, cudaStream_t stream) {
  DownProjectionDgradParams params;
  cudaError_t const error = make_down_projection_dgrad_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_dgrad<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
