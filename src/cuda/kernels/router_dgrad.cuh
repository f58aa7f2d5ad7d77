// SPDX-License-Identifier: Apache-2.0
// router_dgrad: the router's part of dX, dx = dl @ w_router, of all tokens or of those that are listed.
// Shapes   dl (T,E) bf16, w_router (E,d), dx (T,d); with an fp32 router both in terms, like 3E experts
// Work     2*T*E*d FLOP; bytes: 2*T*E + 2*E*d + 2*T*d; memory bound up to E = 184. Listed: of so many tokens
// Schedule persistent, 1 CTA/SM, one segment of T rows; work tile = (m block, n_tile), all loads by TMA
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | store (wait full, arrive empty)
//   router_dgrad_listed: the segment is as long as the list, whose rows of dl are gathered by cp.async; deferred
//   stores to their rows of dx, 16 bytes a lane
// Barriers full, empty [stages], the turn, and named ones: gemm/config.hpp
// Numerics fp32 accumulate, one rounding; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/store.cuh"
#include "../epilogue/store_listed.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct RouterDgradParams {
  gemm::GemmParams gemm;
  gemm::StoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    router_dgrad(__grid_constant__ RouterDgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  gemm::run_gemm<Config::gemm, gemm::StoreEpilogue<gemm::sm90::Core<Config::gemm>>>(p.gemm,
                                                                                    p.epilogue);
#endif
}

struct RouterDgradListedParams {
  gemm::GemmParams gemm;
  gemm::StoreListedParams epilogue;
};

// The previous kernel makes the list and what it names.
template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    router_dgrad_listed(__grid_constant__ RouterDgradListedParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  arch::let_next_kernel_start();  // up_projection_dgrad
  arch::wait_for_previous_kernel();
  gemm::run_gemm<Config::gemm, gemm::StoreListedEpilogue<gemm::sm90::Core<Config::gemm>>>(
      p.gemm, p.epilogue);
#endif
}

// The expert is the k of the product.
inline WeightRows router_as_weights(RouterDgradArguments const& args) {
  return {.gmem = args.w_router.gmem,
          .expert_stride = args.w_router.pitch * args.experts * args.terms,
          .row_stride = 1,
          .column_stride = args.w_router.pitch,
          .block = args.hidden};
}

template <class Config>
cudaError_t launch_router_dgrad_config(RouterDgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, products = int64_t{args.experts} * args.terms;
  RouterDgradParams p{};
  cudaError_t error =
      host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_dlogits, args.tokens, products},
                                        .b = {router_as_weights(args), {}},
                                        .n = d,
                                        .k = products,
                                        .segment_rows = args.tokens,
                                        .total_rows = args.tokens,
                                        .gmem_tile_counter = args.gmem_tile_counter});
  if (error != cudaSuccess) return error;
  error = host::make_ragged_store_map(p.epilogue.d, args.gmem_dx, args.tokens, 1, d, args.tokens,
                                      gemm::kSubtileM, args.dx_pitch);
  if (error != cudaSuccess) return error;
  p.epilogue.columns = int(d);
  p.epilogue.ragged_extent = int(args.tokens);
  return host::launch_persistent<router_dgrad<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(),
      gemm::most_tiles<Config::gemm>(p.gemm, args.tokens), sm_count, p, stream);
}

template <class Config>
cudaError_t launch_router_dgrad_listed_config(RouterDgradArguments const& args, int sm_count,
                                              cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, products = int64_t{args.experts} * args.terms;
  RouterDgradListedParams p{};
  cudaError_t const error =
      host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_dlogits, args.tokens, products},
                                        .gmem_index = args.gmem_tokens,
                                        .b = {router_as_weights(args), {}},
                                        .n = d,
                                        .k = products,
                                        .gmem_offsets = args.gmem_offsets,
                                        .gmem_tile_counter = args.gmem_tile_counter});
  if (error != cudaSuccess) return error;
  p.epilogue.store.gmem_d = static_cast<gemm::bf16*>(args.gmem_dx);
  p.epilogue.store.columns = int(d);
  p.epilogue.gmem_list = args.gmem_tokens;
  p.epilogue.pitch = args.dx_pitch;
  return host::launch_persistent<router_dgrad_listed<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(args.starts_early),
      gemm::most_tiles<Config::gemm>(p.gemm, args.tokens), sm_count, p, stream);
}

}  // namespace tessera::cuda
