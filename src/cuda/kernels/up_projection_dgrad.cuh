// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad: dx row = dh @ w_up[e] [+ dl w_router[e]], one row per (token, expert) pair; the reduction
// runs over the gate half, then over the up half. Where dlogits are 0 but for a token's experts, dl_t w_router is the
// sum of these terms over its rows, and needs no GEMM, no array and no pass of its own.
// Shapes   dh (R,w*n) bf16 in expert order as [gate half | up half], w_up (E,w*n,d) in any layout of
//          WeightRows, dx rows (R,d); w = 2 for gated activations, 1 otherwise
// Work     2*w*R*n*d FLOP; bytes: dh 2*w*R*n, w_up 2*w*E*n*d, dx rows 2*R*d [, dl 4*R, w_router 2*E*d]
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile); all loads by TMA; of a last tile only
//          what there is of w_up (partial_last)
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | round (wait full, arrive empty)
//   dl w_router[e]: one more k16 step of a tile (gemm/sm90/outer_product.cuh)
//   stores under the next tile's k loop (gemm/sm90/deferred.cuh)
// Barriers full, empty [stages] and named ones: gemm/config.hpp
// Numerics fp32 accumulate over both halves, then dl, split into two bf16, times w_router, which is two bf16 as well
//          where it is fp32; one rounding; bitwise
//          repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/store_outer_product.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/split_fp32.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `bool router_part`.
struct UpProjectionDgradParams {
  gemm::GemmParams gemm;
  gemm::StoreOuterProductParams epilogue;
  bool waits_first;
};

// The previous kernel makes what the epilogue adds, or reads what it overwrites. It changes no hook.
template <class Epilogue>
class AfterPreviousKernel : public Epilogue {
 public:
  template <class SharedStorage>
  __device__ __forceinline__ AfterPreviousKernel(SharedStorage& smem,
                                                 typename Epilogue::Params const& p, int consumer)
      : Epilogue(smem, p, consumer) {
    arch::wait_for_previous_kernel();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_dgrad(__grid_constant__ UpProjectionDgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto const before_reads = [&p] {
    if (p.waits_first) arch::wait_for_previous_kernel();
    arch::let_next_kernel_start();  // up_projection_wgrad, which reads dh at once
  };
  if constexpr (Config::router_part) {
    gemm::run_gemm<
        Config::gemm,
        AfterPreviousKernel<gemm::StoreOuterProductEpilogue<gemm::sm90::Core<Config::gemm>>>>(
        p.gemm, p.epilogue, before_reads);
  } else {
    gemm::run_gemm<Config::gemm,
                   AfterPreviousKernel<gemm::StoreEpilogue<gemm::sm90::Core<Config::gemm>>>>(
        p.gemm, p.epilogue.store, before_reads);
  }
#endif
}

template <class Config>
cudaError_t make_up_projection_dgrad_params(UpProjectionDgradParams& p,
                                            UpProjectionDgradArguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  static_assert(kGemm.k_halves() == 2);
  int64_t const d = args.hidden;
  int64_t const n = args.intermediate;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p = {};
  then(host::gemm_params<kGemm>(p.gemm,
                                {.a = {args.gmem_dh, args.rows},
                                 .b = {transposed(args.w_up[0], d), transposed(args.w_up[1], d)},
                                 .n = d,
                                 .k = n,
                                 .k_halves = args.gated ? 2 : 1,
                                 .gmem_offsets = args.gmem_expert_offsets,
                                 .segments = args.experts,
                                 .gmem_tile_counter = args.gmem_tile_counter}));
  if constexpr (!kGemm.defers()) {
    then(host::make_ragged_store_map(p.epilogue.store.d, args.gmem_dx_rows, args.rows, 1, d,
                                     args.rows, gemm::kSubtileM));
  }
  p.waits_first = args.waits_first;
  p.epilogue.store.gmem_d = static_cast<gemm::bf16*>(args.gmem_dx_rows);
  p.epilogue.store.columns = int(d);
  p.epilogue.store.ragged_extent = int(args.rows);
  if constexpr (kGemm.epilogue.outer_product) {
    p.gemm.v_rows = args.router_in_terms ? kDgradTerms : 1;
    then(host::make_matrix_map(p.gemm.v, args.w_router.gmem, args.experts * p.gemm.v_rows, d,
                               args.w_router.pitch, gemm::kOuterRows));
    p.epilogue.gmem_u = args.gmem_row_dlogits;
  }
  return error;
}

template <class Config>
cudaError_t launch_up_projection_dgrad_config(UpProjectionDgradArguments const& args, int sm_count,
                                              cudaStream_t stream) {
  UpProjectionDgradParams params;
  cudaError_t const error = make_up_projection_dgrad_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_dgrad<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(true),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
