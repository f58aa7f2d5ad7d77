// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd: h = x[gather_index] @ w_up[e]^T + b_up[e], a = act(h); h is saved for backward.
// Shapes   x (T,d) bf16, w_up (E,w*n,d) in any layout of WeightRows, h (R,w*n) as [gate half | up
//          half], a (R,n); w = 2 for gated activations, 1 otherwise
// Work     2*w*R*n*d FLOP; bytes: x T*d..R*d, w_up w*E*n*d, h w*R*n, a R*n, 2 each; compute bound from
//          n = 256 on (184 FLOP per byte is the balance point)
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), m blocks fastest: the readers of a
//          tile of w_up begin one after the other (tuning/gemm.hpp)
//   WG0 producer    | fill s0 | fill s1 | fill s2 | fill s3 | next tile: fill s0  (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | mma s1  | mma s2  | mma s3 | round h    (wait full, arrive empty)
//   fill = TMA w_up + rows of x by TMA (already sorted) or cp.async gather (TMA gather needs Blackwell)
//   under the next tile's k loop, in pieces, the two warpgroups in turns (gemm/sm90/deferred.cuh): activation, stores
// Barriers full, empty [stages] and named ones: arrival counts and ids in gemm/config.hpp
// Numerics fp32 accumulate, one rounding each for h and a (a from the rounded h, decision 0023); bitwise
//          repeatable: yes, the tile counter decides who computes a tile, not how
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/activation.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`, `ActivationKind activation`, `bool interleaved`.
struct UpProjectionFwdParams {
  gemm::GemmParams gemm;
  gemm::ActivationParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_fwd(__grid_constant__ UpProjectionFwdParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue = gemm::ActivationEpilogue<gemm::sm90::Core<Config::gemm>, Config::activation,
                                            Config::interleaved>;
  gemm::run_gemm<Config::gemm, Epilogue>(p.gemm, p.epilogue, [] {
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_start();  // down_projection_fwd, which reads the tables at once
  });
#endif
}

template <class Config>
cudaError_t make_up_projection_fwd_params(UpProjectionFwdParams& p,
                                          UpProjectionFwdArguments const& args) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const n = args.intermediate;
  p = {};
  cudaError_t const error = host::gemm_params<kGemm>(
      p.gemm, {.a = args.x,
               .gmem_index = args.gmem_gather_index,
               .b = {Config::interleaved ? joined(args.w_up) : args.w_up[0], args.w_up[1]},
               .n = Config::interleaved ? 2 * n : n,
               .k = args.hidden,
               .gmem_offsets = args.gmem_expert_offsets,
               .segments = args.experts,
               .gmem_tile_counter = args.gmem_tile_counter,
               .gmem_handover = args.gmem_handover});
  constexpr int kHalves = Activation{.kind = Config::activation}.gated() ? 2 : 1;
  for (int half = 0; half < kHalves; ++half) {
    p.epilogue.bias[half] = {static_cast<gemm::bf16 const*>(args.b_up[half].gmem),
                             args.b_up[half].expert_stride, int(args.b_up[half].row_stride)};
  }
  p.epilogue.gmem_h = static_cast<gemm::bf16*>(args.gmem_h);
  p.epilogue.gmem_a = static_cast<gemm::bf16*>(args.gmem_a);
  p.epilogue.activation = args.activation;
  p.epilogue.columns = int(n);
  return error;
}

template <class Config>
cudaError_t launch_up_projection_fwd_config(UpProjectionFwdArguments const& args, int sm_count,
                                            cudaStream_t stream) {
  UpProjectionFwdParams params;
  cudaError_t const error = make_up_projection_fwd_params<Config>(params, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_fwd<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(true),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
