// SPDX-License-Identifier: Apache-2.0
// down_projection_wgrad and up_projection_wgrad of sm_100a, one kernel: for every expert e and half
//   dW[half][e](i, c) = sum over rows r of e, ascending, of right[r, half*n + i] * left[gather_index[r], c]
// dw_down: left = dO, right = a'; dw_up: left = x, right = dh.
// Compiled and emulated, never run on hardware.
// Shapes   left (T,d) bf16, right (R,halves*n), dW (E, halves*n x d elements) in any layout of WeightRows, bf16 or
//          fp32
// Work     2*halves*R*n*d FLOP; bytes: left 2*T*d..2*R*d, right 2*halves*R*n, dW 2 or 4 times halves*E*n*d, twice
//          that to read when adding
// Schedule persistent, 1 CTA/SM; varlen-K: work tile = (expert, 128 of d by one CTA or 256 by a pair, 256 of halves*n),
//          k = the expert's rows; two accumulators in tensor memory, so that a tile is stored under the next one's k
//          loop
//     warps 4-7  gather   | fill s0 | fill s1 | ..              (wait empty; cp.async of left, ragged TMA of right)
//     warp 8     multiply | tile 0 k loop | tile 1 k loop | ..  (wait full, acc_empty; commit to empty, acc_full)
//     warps 0-3  epilogue |               | store tile 0  | ..  (wait acc_full; arrive acc_empty)
//   rows past the expert are zero in both operands, since zero times a neighbour's NaN is NaN
// Barriers full, empty, acc_full, acc_empty, work_full, work_empty, loads: gemm/sm100/storage.cuh
// Numerics fp32 accumulate in row order, one rounding (fp32: none), one addition; bitwise repeatable: yes
// Requires what refuse() asks of the kernel for sm_90 (layer/select.cpp)     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/wgrad_rows.cuh"
#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/wgrad_params.hpp"

namespace tessera::cuda {

// kMajor: dW is contiguous along d (kK) or along n.
template <gemm::Major kMajor, bool kFp32>
struct ProjectionWgradSm100 {
  static constexpr gemm::Major d_major = kMajor;
  static constexpr bool fp32 = kFp32;
  static constexpr gemm::GemmConfig gemm{
      .consumer_warpgroups = 1,
      .ragged = gemm::Ragged::kK,
      .a = {.loader = gemm::Loader::kGather, .major = gemm::Major::kRows},
      .b = {.major = gemm::Major::kRows}};
};

// CTAs of a pair have neighbours along d, 128 each, and each CTA loads half of `right`.
template <gemm::Major kMajor, bool kFp32>
struct ProjectionWgradSm100Pair {
  static constexpr gemm::Major d_major = kMajor;
  static constexpr bool fp32 = kFp32;
  static constexpr gemm::GemmConfig gemm{
      .stages = 6,
      .consumer_warpgroups = 1,
      .ragged = gemm::Ragged::kK,
      .a = {.loader = gemm::Loader::kGather, .major = gemm::Major::kRows},
      .b = {.major = gemm::Major::kRows},
      .cluster = {2, gemm::Sharing::kMulticast}};
};

struct ProjectionWgradSm100Params {
  gemm::GemmParams gemm;
  gemm::WgradStoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    projection_wgrad_sm100(__grid_constant__ ProjectionWgradSm100Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Core = gemm::TensorMemoryCore<Config::gemm>;
  gemm::run_gemm_in_tensor_memory<Config::gemm,
                                  gemm::WgradRows<Core, Config::d_major, Config::fp32>>(p.gemm,
                                                                                        p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_projection_wgrad_sm100(WgradArguments const& args, int sm_count,
                                          cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  if (args.is_fp32 != Config::fp32) return cudaErrorInvalidValue;
  ProjectionWgradSm100Params params;
  constexpr bool kRowsMajor = Config::d_major == gemm::Major::kRows;
  cudaError_t const error = host::make_wgrad_params<kGemm, kRowsMajor>(params.gemm, params.epilogue,
                                                                       args, gemm::kWarpSlabRows);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<projection_wgrad_sm100<Config>>(
      {gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
       int(sizeof(gemm::SharedStorage<kGemm>))},
      gemm::most_tiles<kGemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
