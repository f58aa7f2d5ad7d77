// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of sm_100a: t = dO[gather_index] @ w_down[e] stays in tensor memory; with s the row's score,
//   ds partial = <t, act(h)>,  dh = J_act(h)^T (s t),  a' = s act(h)
// Compiled and emulated, never run on hardware.
// Shapes   dO (T,d) bf16, w_down (E,d,n) in any layout of WeightRows, h and dh (R,w*n) as [gate half | up half], a'
//          (R,n), ds partials (R, n/128) fp32; w = 2 for gated activations, 1 otherwise
// Work     2*R*n*d FLOP; bytes: dO T*d..R*d, w_down E*n*d, h w*R*n, dh w*R*n, a' R*n, 2 each
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), 128 rows by one CTA or 256 by a pair; two
//          accumulators in tensor memory, so that a tile is differentiated and stored under the next one's k loop
//     warps 4-7  gather   | fill s0 | fill s1 | ..              (wait empty; cp.async of dO, TMA of w_down)
//     warp 8     multiply | tile 0 k loop | tile 1 k loop | ..  (wait full, acc_empty; commit to empty, acc_full)
//     warps 0-3  epilogue | load h 0, 1   | differentiate, store 0 | ..  (wait acc_full, loads; arrive acc_empty)
// Barriers full, empty, acc_full, acc_empty, work_full, work_empty, loads: gemm/sm100/storage.cuh
// Numerics fp32 accumulate, activation recomputed in fp32 from the rounded h, one rounding per stored value; a thread
//          adds up ds in the order of columns; bitwise repeatable: yes
// Requires what refuse() asks of the kernel for sm_90 (layer/select.cpp); halves apart, not interleaved
// Doc      docs/kernels/blackwell.md
#pragma once

#include "../epilogue/activation_gradient_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

static_assert(kScoreGroup == gemm::kGroupColumns);

// Slabs of each warp: h in two buffers, and a'.
template <ActivationKind kKind>
constexpr int kGradientSlabs = Activation{.kind = kKind}.gated() ? 5 : 3;

template <ActivationKind kKind, gemm::Major kMajor>
struct DownProjectionDgradSm100 {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.stages = 3,
                                         .consumer_warpgroups = 1,
                                         .a = {.loader = gemm::Loader::kGather},
                                         .b = {.major = kMajor},
                                         .epilogue = {.slabs = kGradientSlabs<kKind>}};
};
template <ActivationKind kKind, gemm::Major kMajor>
struct DownProjectionDgradSm100Pair {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.stages = 4,
                                         .consumer_warpgroups = 1,
                                         .a = {.loader = gemm::Loader::kGather},
                                         .b = {.major = kMajor},
                                         .cluster = {2, gemm::Sharing::kMulticast},
                                         .epilogue = {.slabs = kGradientSlabs<kKind>}};
};

struct DownProjectionDgradSm100Params {
  gemm::GemmParams gemm;
  gemm::ActivationGradientRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    down_projection_dgrad_sm100(__grid_constant__ DownProjectionDgradSm100Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Core = gemm::TensorMemoryCore<Config::gemm>;
  using Epilogue = gemm::ActivationGradientRows<Core, Config::activation>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_down_projection_dgrad_sm100_params(DownProjectionDgradSm100Params& p,
                                                    DownProjectionDgradArguments const& args) {
  if (args.interleaved || args.activation.kind != Config::activation) return cudaErrorInvalidValue;
  int64_t const n = args.intermediate;
  int const halves = args.activation.gated() ? 2 : 1;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p = {};
  then(host::gemm_params<Config::gemm>(p.gemm, {.a = args.d_o,
                                                .gmem_index = args.gmem_gather_index,
                                                .b = {transposed(args.w_down, n), {}},
                                                .n = n,
                                                .k = args.hidden,
                                                .gmem_offsets = args.gmem_expert_offsets,
                                                .segments = args.experts,
                                                .gmem_tile_counter = args.gmem_tile_counter}));
  then(host::make_halves_map(p.epilogue.h, args.gmem_h, args.rows, halves, n, gemm::kWarpSlabRows));
  then(host::make_ragged_store_map(p.epilogue.dh, args.gmem_dh, args.rows, halves, n, args.rows,
                                   gemm::kWarpSlabRows));
  p.epilogue.stores_a = args.gmem_a_scaled != nullptr;
  if (p.epilogue.stores_a) {
    then(host::make_ragged_store_map(p.epilogue.a_scaled, args.gmem_a_scaled, args.rows, 1, n,
                                     args.rows, gemm::kWarpSlabRows));
  }
  p.epilogue.gmem_partials = args.gmem_ds_partials;
  p.epilogue.gmem_scores = args.gmem_scores;
  p.epilogue.gmem_permutation = args.gmem_sort_permutation;
  p.epilogue.activation = args.activation;
  p.epilogue.columns = int(n);
  p.epilogue.groups = int(score_groups(n));
  p.epilogue.ragged_extent = int(args.rows);
  return error;
}

template <class Config>
cudaError_t launch_down_projection_dgrad_sm100(DownProjectionDgradArguments const& args,
                                               int sm_count, cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  DownProjectionDgradSm100Params p;
  cudaError_t const error = make_down_projection_dgrad_sm100_params<Config>(p, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_dgrad_sm100<Config>>(
      {gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
       int(sizeof(gemm::SharedStorage<kGemm>))},
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
