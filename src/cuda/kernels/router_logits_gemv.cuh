// SPDX-License-Identifier: Apache-2.0
// router_logits_gemv: l = x @ w_router^T + b_router for few tokens, not rounded.
// Shapes   x (T,d) bf16, w_router (E,d) bf16 or fp32, l (T,E) fp32
// Work     2*T*E*d FLOP; bytes: 2*E*d, or 4*E*d, out of L2 for every 4 tokens
// Schedule a warp per expert, kGemvRows tokens at a time (warp/gemv.cuh)
// Numerics fp32 sums of 32 lanes, folded by halves; bitwise repeatable: yes
// Requires rows of 16 bytes (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../host/projection.hpp"
#include "../warp/gemv.cuh"

namespace tessera::cuda {

// W: of w_router and b_router.
template <class W>
struct RouterLogitsGemv {
  using Weight = W;
  static constexpr int kWarps = 4;
};

template <class Config>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    router_logits_gemv(__grid_constant__ RouterLogitsArguments const p) {
  arch::let_next_kernel_start();  // route
  int const expert = static_cast<int>(blockIdx.x) * Config::kWarps + arch::warp_idx();
  if (expert >= p.experts) return;
  int64_t const first = int64_t{blockIdx.y} * warp::kGemvRows;
  int const count = static_cast<int>(min(int64_t{warp::kGemvRows}, p.x.rows - first));
  auto const* const gmem_x = static_cast<__nv_bfloat16 const*>(p.x.gmem);
  using Weight = typename Config::Weight;
  Weight const* const w[1] = {static_cast<Weight const*>(p.w_router.gmem) +
                              expert * p.w_router.pitch};
  float const bias = p.gmem_b_router != nullptr
                         ? static_cast<float>(static_cast<Weight const*>(p.gmem_b_router)[expert])
                         : 0.0f;
  warp::with_rows(count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    __nv_bfloat16 const* x[kRows];
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) x[i] = gmem_x + (first + min(i, count - 1)) * p.x.pitch;
    float sums[kRows][1];
    warp::dot_products(x, w, static_cast<int>(p.hidden), sums);
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (i < count && arch::lane_idx() == 0) {
        p.gmem_logits[(first + i) * p.experts + expert] = sums[i][0] + bias;
      }
    }
  });
}

template <class Config>
cudaError_t launch_router_logits_gemv_config(RouterLogitsArguments const& args,
                                             cudaStream_t stream) {
  int64_t const groups = (args.x.rows + warp::kGemvRows - 1) / warp::kGemvRows;
  if (groups == 0 || args.experts == 0) return cudaSuccess;
  if (groups > UINT16_MAX) return cudaErrorInvalidValue;
  dim3 const ctas(unsigned((args.experts + Config::kWarps - 1) / Config::kWarps), unsigned(groups));
  router_logits_gemv<Config><<<ctas, Config::kWarps * arch::kWarpThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
