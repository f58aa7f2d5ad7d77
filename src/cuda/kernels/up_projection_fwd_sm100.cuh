// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd on sm_100a: h = x[gather_index] @ w_up[e]^T + b_up[e], a = act(h).
// Compiled and emulated, never run on hardware.
// Shapes   x (T,d) bf16, w_up (E,w*n,d) in any layout of WeightRows, h (R,w*n) as [gate half | up half], a (R,n); w = 2
//          for gated activations, 1 otherwise
// Work     2*w*R*n*d FLOP; bytes: x T*d..R*d, w_up w*E*n*d, h w*R*n, a R*n, 2 each
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), 128 rows by one CTA or 256 by a pair; two
//          accumulators in tensor memory: bias, activation and stores run under the next tile's k loop
//          (roles and barriers: gemm/sm100/storage.cuh)
// Numerics fp32 accumulate, one rounding each for h and a (a from the rounded h, decision 0023); bitwise repeatable
// Requires what refuse() asks of the kernel for sm_90 (layer/select.cpp); halves apart, not interleaved
// Doc      docs/kernels/blackwell.md
#pragma once

#include "../epilogue/activation_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/projection.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

template <ActivationKind kKind>
constexpr gemm::Halves kHalvesOfUp =
    Activation{.kind = kKind}.gated() ? gemm::Halves::kAlongRows : gemm::Halves::kOne;

// Rows of x lie in the order of experts.
template <ActivationKind kKind, gemm::Major kMajor>
struct UpProjectionFwdSm100 {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.consumer_warpgroups = 1,
                                         .b = {.major = kMajor, .halves = kHalvesOfUp<kKind>}};
};
// Rows of x are gathered, or lie in that order as well: without an index.
template <ActivationKind kKind, gemm::Major kMajor>
struct UpProjectionFwdSm100Gathered {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.consumer_warpgroups = 1,
                                         .a = {.loader = gemm::Loader::kGather},
                                         .b = {.major = kMajor, .halves = kHalvesOfUp<kKind>}};
};
template <ActivationKind kKind, gemm::Major kMajor>
struct UpProjectionFwdSm100Pair {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.stages = 6,
                                         .consumer_warpgroups = 1,
                                         .b = {.major = kMajor, .halves = kHalvesOfUp<kKind>},
                                         .cluster = {2, gemm::Sharing::kMulticast}};
};

template <ActivationKind kKind, gemm::Major kMajor>
struct UpProjectionFwdSm100GatheredPair {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{.stages = 6,
                                         .consumer_warpgroups = 1,
                                         .a = {.loader = gemm::Loader::kGather},
                                         .b = {.major = kMajor, .halves = kHalvesOfUp<kKind>},
                                         .cluster = {2, gemm::Sharing::kMulticast}};
};

struct UpProjectionFwdSm100Params {
  gemm::GemmParams gemm;
  gemm::ActivationRowsParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    up_projection_fwd_sm100(__grid_constant__ UpProjectionFwdSm100Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Core = gemm::TensorMemoryCore<Config::gemm>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, gemm::ActivationRows<Core, Config::activation>>(
      p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t make_up_projection_fwd_sm100_params(UpProjectionFwdSm100Params& p,
                                                UpProjectionFwdArguments const& args) {
  int64_t const n = args.intermediate;
  if (args.gmem_gather_index != nullptr && !Config::gemm.gathers()) return cudaErrorInvalidValue;
  if (args.interleaved || args.activation.kind != Config::activation) return cudaErrorInvalidValue;
  constexpr int kHalves = Config::gemm.b_halves();
  if (args.gmem_h == nullptr && args.gmem_a == nullptr) return cudaErrorInvalidValue;
  p = {};
  cudaError_t error =
      host::gemm_params<Config::gemm>(p.gemm, {.a = args.x,
                                               .gmem_index = args.gmem_gather_index,
                                               .b = {args.w_up[0], args.w_up[1]},
                                               .n = n,
                                               .k = args.hidden,
                                               .gmem_offsets = args.gmem_expert_offsets,
                                               .segments = args.experts,
                                               .gmem_tile_counter = args.gmem_tile_counter});
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p.epilogue.stores_h = args.gmem_h != nullptr;
  if (p.epilogue.stores_h) {
    then(host::make_ragged_store_map(p.epilogue.h, args.gmem_h, args.rows, kHalves, n, args.rows,
                                     gemm::kWarpSlabRows));
  }
  p.epilogue.stores_a = args.gmem_a != nullptr;
  if (p.epilogue.stores_a) {
    then(host::make_ragged_store_map(p.epilogue.a, args.gmem_a, args.rows, 1, n, args.rows,
                                     gemm::kWarpSlabRows));
  }
  for (int half = 0; half < kHalves; ++half) {
    p.epilogue.bias[half] = {static_cast<gemm::bf16 const*>(args.b_up[half].gmem),
                             args.b_up[half].expert_stride, int(args.b_up[half].row_stride)};
  }
  p.epilogue.activation = args.activation;
  p.epilogue.columns = int(n);
  p.epilogue.ragged_extent = int(args.rows);
  return error;
}

template <class Config>
cudaError_t launch_up_projection_fwd_sm100(UpProjectionFwdArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  UpProjectionFwdSm100Params p;
  cudaError_t const error = make_up_projection_fwd_sm100_params<Config>(p, args);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<up_projection_fwd_sm100<Config>>(
      {gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
       int(sizeof(gemm::SharedStorage<kGemm>))},
      gemm::most_tiles<kGemm>(p.gemm, args.rows), sm_count, p, stream);
}

}  // namespace tessera::cuda
