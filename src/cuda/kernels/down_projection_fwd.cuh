// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd: y = a @ w_down[e]^T + b_down[e], one row per (token, expert) pair.
// Shapes   a (R,n) bf16 in expert order, w_down (E,d,n) in any layout of WeightRows, y (R,d)
// Work     2*R*n*d FLOP; bytes: a 2*R*n, w_down 2*E*n*d, y 2*R*d; at n = 256 stores and multiplication
//          take about the same time (184 FLOP per byte is the balance point)
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile); all loads by TMA; of a last tile only
//          what there is of w_down, and half of it multiplied if that is enough (partial_last, halves_last)
//   ping-pong, B stays for a run of tiles (short n, tuning/gemm.hpp): stores run under the other's multiplication
//     WG0 producer    | fill s0 | fill s1 | ..          (wait empty, arrive full)
//     WG1             | mma tile 0   | store tile 0 | mma tile 2
//     WG2             |       (turn) | mma tile 1   | store tile 1
//   cooperative (longer n): stores under the next tile's k loop (gemm/sm90/deferred.cuh)
//     WG0 warp 0      | fill s0 | .. 8 k_tiles before the end: arrive draw
//         warp 1      | wait draw | sleep, draw and announce the next tile
//     WG1,2 consumers |         | mma s0  | .. | round  (wait full, arrive empty)
//   starts in the tail of up_projection_fwd (gemm/handover.cuh)
// Barriers full, empty [stages], draw, the turn, and named ones: gemm/config.hpp
// Numerics fp32 accumulate and bias, one rounding; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../epilogue/store.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/kernel_limits.hpp"
#include "../host/launch.hpp"
#include "../host/projection.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

static_assert(kMaxGemmSegments == gemm::kMaxSegments);

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
struct DownProjectionFwdParams {
  gemm::GemmParams gemm;
  gemm::StoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    down_projection_fwd(__grid_constant__ DownProjectionFwdParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  gemm::run_gemm<Config::gemm, gemm::StoreEpilogue<gemm::sm90::Core<Config::gemm>>>(p.gemm,
                                                                                    p.epilogue);
#endif
}

template <class Config>
cudaError_t make_down_projection_fwd_params(DownProjectionFwdParams& p,
                                            DownProjectionFwdArguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden;
  int64_t const n = args.intermediate;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p = {};
  then(host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_a, args.rows, n},
                                         .b = {args.w_down, {}},
                                         .n = d,
                                         .k = n,
                                         .gmem_offsets = args.gmem_expert_offsets,
                                         .segments = args.experts,
                                         .gmem_tile_counter = args.gmem_tile_counter,
                                         .gmem_handover = args.gmem_handover}));
  if constexpr (!kGemm.defers()) {
    then(host::make_ragged_store_map(p.epilogue.d, args.gmem_y, args.rows, 1, d, args.rows,
                                     gemm::kSubtileM));
  }
  p.epilogue.bias = {static_cast<gemm::bf16 const*>(args.b_down.gmem), args.b_down.expert_stride,
                     int(args.b_down.row_stride)};
  p.epilogue.gmem_d = static_cast<gemm::bf16*>(args.gmem_y);
  p.epilogue.columns = int(d);
  p.epilogue.ragged_extent = int(args.rows);
  if (kGemm.keeps_b() && p.gemm.k_tiles > kGemm.resident_k_tiles()) return cudaErrorInvalidValue;
  return error;
}

template <class Config>
cudaError_t launch_down_projection_fwd_config(DownProjectionFwdArguments const& args, int sm_count,
                                              cudaStream_t stream) {
  DownProjectionFwdParams params;
  cudaError_t const error = make_down_projection_fwd_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<down_projection_fwd<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(args.gmem_handover !=
                                                                              nullptr),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
