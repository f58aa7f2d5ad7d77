// SPDX-License-Identifier: Apache-2.0
// router_logits: l = x @ w_router^T + b_router, not rounded.
// Shapes   x (T,d) bf16, w_router (E,d), l (T,E) fp32
// Work     2*T*E*d FLOP; bytes: 2*T*d + 2*E*d + 4*T*E; memory bound up to E = 184. An fp32 w_router comes as three
//          bf16 terms (host/split_fp32.hpp), which meet each k_tile of x in turn: three times the FLOP, 6*E*d
// Schedule persistent, 1 CTA/SM, one segment of T rows; work tile = (m block, n_tile), a grid apart, all loads by TMA
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | store (wait full, arrive empty)
// Barriers full, empty [stages], the turn, and named ones: gemm/config.hpp
// Numerics fp32 accumulate and bias; products with fp32 weights are exact; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/store_fp32.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection.hpp"
#include "../host/split_fp32.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `bool lets_next`: whether route may start at
// once, which for up to 128 experts has so few CTAs that they would crowd on the SMs that run out of tiles first.
struct RouterLogitsParams {
  gemm::GemmParams gemm;
  gemm::StoreFp32Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    router_logits(__grid_constant__ RouterLogitsParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Config::lets_next) arch::let_next_kernel_start();  // route
  gemm::run_gemm<Config::gemm, gemm::StoreFp32Epilogue<gemm::sm90::Core<Config::gemm>>>(p.gemm,
                                                                                        p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_router_logits_config(RouterLogitsArguments const& args, int sm_count,
                                        cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  static_assert(!kGemm.draws_tiles(), "no counter comes with the arguments");
  int64_t const d = args.hidden;
  RouterLogitsParams p{};
  constexpr bool kTerms = kGemm.b_terms() > 1;
  static_assert(kGemm.b_terms() == 1 ||
                (kGemm.b_terms() == kMaxTerms && kGemm.tile.k == kRouterBlock));
  if (args.is_fp32 != kTerms) return cudaErrorInvalidValue;
  int64_t const pitch = kTerms ? router_terms_pitch(d) : args.w_router.pitch;
  WeightRows const w_router{.gmem = kTerms ? args.gmem_terms : args.w_router.gmem,
                            .expert_stride = pitch * args.experts,
                            .row_stride = pitch,
                            .column_stride = 1,
                            .block = args.experts};
  cudaError_t const error = host::gemm_params<kGemm>(p.gemm, {.a = args.x,
                                                              .b = {w_router, {}},
                                                              .n = args.experts,
                                                              .k = d,
                                                              .segment_rows = args.x.rows,
                                                              .total_rows = args.x.rows});
  if (error != cudaSuccess) return error;
  p.epilogue = {
      .gmem = args.gmem_logits,
      .gmem_bias = args.gmem_b_router,
      .columns = args.experts,
      .in_pairs = args.experts % 2 == 0 && reinterpret_cast<uintptr_t>(args.gmem_logits) % 8 == 0};
  return host::launch_persistent<router_logits<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(p.gemm, args.x.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
