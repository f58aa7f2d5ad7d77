// SPDX-License-Identifier: Apache-2.0
// router_wgrad: dw_router = dl^T @ x, in two launches: partial sums of chunks of tokens, then their sum.
// Shapes   dl (T,E) bf16, x (T,d), partials (chunks,E,d) fp32, dw_router (E,d) bf16 or fp32
// Work     2*T*E*d FLOP; bytes: 2*T*E + 2*T*d + (4 + 4)*chunks*E*d + 2*E*d
// Schedule the first persistent, 1 CTA/SM; varlen-K: work tile = (chunk, tile_m of d, tile_n of E), k = its tokens
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | store (wait full, arrive empty)
//          the second: one thread per 4 elements
// Barriers full, empty [stages] and named ones: gemm_config.hpp
// Numerics fp32 accumulate in token order inside a chunk, chunks in order, one rounding; the chunks depend on the
//          shape alone; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../block/epilogue/wgrad_store.cuh"
#include "../block/gemm.cuh"
#include "../host/launch.hpp"
#include "../host/router_backward.hpp"
#include "../host/wgrad_params.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr block::GemmConfig gemm` and `block::Major d_major`.
struct RouterWgradParams {
  block::GemmParams gemm;
  block::WgradStoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    router_wgrad(__grid_constant__ RouterWgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = block::WgradStoreEpilogue<Config::gemm, Config::d_major, true>;
  block::run_gemm<Config::gemm, Epilogue>(p.gemm, p.epilogue);
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_kernel_ahead();
#endif
}

__device__ inline void add_to(float4& sum, float const* gmem) {
  sum.x += gmem[0];
  sum.y += gmem[1];
  sum.z += gmem[2];
  sum.w += gmem[3];
}
__device__ inline void add_to(float4& sum, __nv_bfloat16 const* gmem) {
  sum.x += __bfloat162float(gmem[0]);
  sum.y += __bfloat162float(gmem[1]);
  sum.z += __bfloat162float(gmem[2]);
  sum.w += __bfloat162float(gmem[3]);
}
__device__ inline void put(float* gmem, float value) { *gmem = value; }
__device__ inline void put(__nv_bfloat16* gmem, float value) { *gmem = __float2bfloat16_rn(value); }

constexpr int kRouterWgradSumThreads = 256;

// d is a multiple of 4.
template <class Gradient>
__global__ void __launch_bounds__(kRouterWgradSumThreads)
    router_wgrad_sum(RouterWgradArguments const p, int const chunks) {
  int64_t const row_groups = p.hidden / 4;
  int64_t const group = int64_t{blockIdx.x} * kRouterWgradSumThreads + threadIdx.x;
  if (group >= p.experts * row_groups) return;
  float4 sum{};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    add_to(sum, p.gmem_partials + chunk * p.experts * p.hidden + group * 4);
  }
  auto* const gmem = static_cast<Gradient*>(p.gmem_dw_router) + group / row_groups * p.dw_pitch +
                     group % row_groups * 4;
  if (p.accumulates) add_to(sum, gmem);
  put(gmem, sum.x);
  put(gmem + 1, sum.y);
  put(gmem + 2, sum.z);
  put(gmem + 3, sum.w);
}

template <class Config>
cudaError_t launch_router_wgrad_config(RouterWgradArguments const& args, int sm_count,
                                       cudaStream_t stream) {
  int64_t const tokens = args.x.rows, d = args.hidden, experts = args.experts;
  int64_t const chunks = router_wgrad_chunks(tokens, d, experts);
  RouterWgradParams params;
  cudaError_t error = host::make_wgrad_params < Config::gemm,
              Config::d_major ==
                  block::Major::kRows > (params.gemm, params.epilogue,
                                         {.left = args.x,
                                          .gmem_gather_index = nullptr,
                                          .gmem_expert_offsets = nullptr,
                                          .gmem_right = args.gmem_dlogits,
                                          .halves = 1,
                                          .dw = {{.gmem = args.gmem_partials,
                                                  .expert_stride = experts * d,
                                                  .row_stride = d,
                                                  .column_stride = 1,
                                                  .block = experts}},
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
  error = host::launch_persistent<router_wgrad<Config>>(
      host::persistent_shape<Config::gemm, block::SharedStorage<Config::gemm>>(args.starts_early),
      block::most_tiles<Config::gemm>(params.gemm, tokens), sm_count, params, stream);
  if (error != cudaSuccess) return error;
  int64_t const groups = experts * d / 4;
  auto const blocks = unsigned((groups + kRouterWgradSumThreads - 1) / kRouterWgradSumThreads);
  if (args.is_fp32) {
    router_wgrad_sum<float><<<blocks, kRouterWgradSumThreads, 0, stream>>>(args, int(chunks));
  } else {
    router_wgrad_sum<__nv_bfloat16>
        <<<blocks, kRouterWgradSumThreads, 0, stream>>>(args, int(chunks));
  }
  return cudaGetLastError();
}

}  // namespace tessera::cuda
