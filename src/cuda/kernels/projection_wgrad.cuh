// SPDX-License-Identifier: Apache-2.0
// down_projection_wgrad and up_projection_wgrad, one kernel: for every expert e and half
//   dW[half][e](i, c) = sum over rows r of e, ascending, of right[r, half*n + i] * left[gather_index[r], c]
// dw_down: left = dO, right = a'; dw_up: left = x, right = dh.
// Shapes   left (T,d) bf16, right (R,halves*n), dW (E, halves*n x d elements) in any layout of WeightRows, bf16 or
//          fp32
// Work     2*halves*R*n*d FLOP; bytes: left 2*T*d..2*R*d, right 2*halves*R*n, dW 2 or 4 times halves*E*n*d, twice
//          that to read when adding
// Schedule persistent, 1 CTA/SM; varlen-K: work tile = (expert, tile_m of d, tile_n of halves*n), k = the expert's
//          rows, those with most of them first; in pairs two CTAs take neighbours along d and load half of B each,
//          for both
//   WG0 producer    | fill s0 | fill s1 | ..         (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | .. | store (wait full, arrive empty)
//   fill = cp.async gather of left + ragged TMA of right; rows past the expert are zero in both, since zero times
//   a neighbour's NaN is NaN
//   store = under the next tile's k loop: bf16 that replaces what was there (gemm/sm90/deferred.cuh), and fp32
//           (epilogue/wgrad_sums.cuh)
// Barriers full, empty [stages] and named ones: gemm/config.hpp
// Numerics fp32 accumulate in row order, one rounding (fp32: none), one addition; bitwise repeatable: yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include "../arch/dependent_launch.cuh"
#include "../epilogue/wgrad_store.cuh"
#include "../gemm/sm90/roles.cuh"
#include "../host/launch.hpp"
#include "../host/projection_backward.hpp"
#include "../host/wgrad_params.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`, `gemm::Major d_major` and `bool fp32`.
struct ProjectionWgradParams {
  gemm::GemmParams gemm;
  gemm::WgradStoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    projection_wgrad(__grid_constant__ ProjectionWgradParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Epilogue =
      gemm::WgradStoreEpilogue<gemm::sm90::Core<Config::gemm>, Config::d_major, Config::fp32>;
  if (p.gemm.k_tiles_before_next == 0) arch::let_next_kernel_start();
  gemm::run_gemm<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_projection_wgrad_config(WgradArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  if (Config::gemm.defers() && !Config::fp32 && args.accumulates) return cudaErrorInvalidValue;
  ProjectionWgradParams params;
  cudaError_t const error = host::make_wgrad_params < Config::gemm,
                    Config::d_major == gemm::Major::kRows > (params.gemm, params.epilogue, args);
  if (error != cudaSuccess) return error;
  // Beside the aggregate soon; router_dlogits only fills the tail. In tiles as long as all are if experts have as many
  // rows each.
  int64_t const tile_rows = (args.rows + args.experts - 1) / args.experts;
  int const tiles = !Config::gemm.takes_over()             ? 0
                    : args.starts_early                    ? 1
                    : params.gemm.gmem_handover != nullptr ? 3
                                                           : 0;
  params.gemm.k_tiles_before_next = tiles * host::parts_of(tile_rows, Config::gemm.tile.k);
  return host::launch_persistent<projection_wgrad<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(
          params.gemm.k_tiles_before_next > 0),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda
