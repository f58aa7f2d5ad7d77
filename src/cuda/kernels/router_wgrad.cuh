// SPDX-License-Identifier: Apache-2.0
// router_wgrad: dw_router = dl^T @ x, in chunks of tokens whose sums are then added up by all.
// Shapes   dl (T,E) bf16, x (T,d), dw_router (E,d) bf16 or fp32; workspace: the chunks' sums (chunks,E,d) fp32, d a
//          multiple of 128 there. dl of an fp32 router as two terms (T,2,E), like 2E experts, whose sums are added up
// Work     2*T*E*d FLOP; bytes: 2*T*E + 2*T*d + (4 + 4)*chunks*E*d + 2*E*d
// Schedule persistent, 1 CTA/SM; varlen-K: work tile = (chunk, tile_m of d, tile_n of E), k = its tokens
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | store (wait full, arrive empty)
//   when all tiles are stored: every warp adds up a share of dw_router (epilogue/chunk_sum.cuh)
// Barriers full, empty [stages] and named ones: gemm/config.hpp
//   with padding: cp.async gather of the real tokens' x, the chunks are those of so many tokens
// Numerics fp32 accumulate in token order inside a chunk, chunks in order, one rounding; the chunks depend on the
//          shape and the number of real tokens alone; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/chunk_sum.cuh"
#include "../epilogue/wgrad_store.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
#include "../host/wgrad_params.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct RouterWgradParams {
  gemm::GemmParams gemm;
  gemm::ChunkSumParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    router_wgrad(__grid_constant__ RouterWgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  gemm::run_gemm<Config::gemm, gemm::ChunkSumEpilogue<gemm::sm90::Core<Config::gemm>>>(p.gemm,
                                                                                       p.epilogue);
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
#endif
}

template <class Config>
cudaError_t launch_router_wgrad_config(RouterWgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  int64_t const tokens = args.x.rows, d = args.hidden;
  int64_t const experts = int64_t{args.experts} * args.terms;
  constexpr bool kGathers = Config::gemm.gathers();  // the real tokens
  if (kGathers != (args.gmem_order != nullptr)) return cudaErrorInvalidValue;
  int64_t const chunks = kGathers ? router_wgrad_most_chunks(tokens, d, experts)
                                  : router_wgrad_chunks(tokens, d, experts);
  RouterWgradParams params;
  gemm::WgradStoreParams no_store;
  cudaError_t const error =
      host::make_wgrad_params<Config::gemm, false>(params.gemm, no_store,
                                                   {.left = args.x,
                                                    .gmem_gather_index = args.gmem_order,
                                                    .gmem_expert_offsets = args.gmem_chunk_offsets,
                                                    .gmem_right = args.gmem_dlogits,
                                                    .halves = 1,
                                                    .dw = {},
                                                    .is_fp32 = true,
                                                    .accumulates = false,
                                                    .rows = tokens,
                                                    .hidden = d,
                                                    .intermediate = experts,
                                                    .experts = int32_t(chunks),
                                                    .gmem_tile_counter = args.gmem_tile_counter});
  if (error != cudaSuccess) return error;
  params.gemm.segment_rows = int(router_wgrad_chunk(tokens, d, experts));
  params.gemm.total_rows = int(tokens);
  params.epilogue = {.gmem_parts = reinterpret_cast<float4*>(args.gmem_partials),
                     .gmem_arrived = args.gmem_arrived,
                     .gmem_d = args.gmem_dw_router,
                     .d_pitch = args.dw_pitch,
                     .is_fp32 = args.is_fp32,
                     .accumulates = args.accumulates,
                     .rows = int(d),
                     .columns = int(experts),
                     .terms = args.terms,
                     .segments = int(chunks),
                     .m_tiles = params.gemm.m_tiles,
                     .n_tiles = params.gemm.n_tiles};
  return host::launch_persistent<router_wgrad<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(args.starts_early),
      gemm::most_tiles<Config::gemm>(params.gemm, tokens), sm_count, params, stream);
}

}  // namespace tessera::cuda
