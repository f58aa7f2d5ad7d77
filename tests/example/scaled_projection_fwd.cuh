// SPDX-License-Identifier: Apache-2.0
// scaled_projection_fwd: y = scale[e] * (a @ w_down[e]^T) + b_down[e], one row per (token, expert) pair. A kernel to
// copy: down_projection_fwd with one elementwise epilogue more. The walk is docs/add-a-kernel.md.
// Shapes   as down_projection_fwd; scale (E) fp32
// Work     as down_projection_fwd, and R*d multiplications: tile.n/2 a thread and tile, in registers
// Schedule, barriers as down_projection_fwd
// Numerics fp32 accumulate, scale and bias, one rounding; bitwise repeatable: yes
// Requires as down_projection_fwd; scale for every expert
#pragma once

#include "cuda/kernels/down_projection_fwd.cuh"

namespace tessera::cuda::example {

struct ScaledStoreParams {
  gemm::StoreParams store;
  float const* gmem_scale;  // (E)
};

// The epilogue: accumulators times the segment's scale, then what StoreDeferred does with them. It is deferred, so that
// GEMM configurations whose epilogue has that mode can take it; a hook that changes nothing is handed on by name.
template <gemm::GemmConfig kGemm>
class ScaledStore {
 public:
  static constexpr gemm::EpilogueMode kMode = gemm::EpilogueMode::kDeferred;
  using Params = ScaledStoreParams;

  __device__ __forceinline__ ScaledStore(gemm::SharedStorage<kGemm>& smem, Params const& p,
                                         int consumer)
      : p_(p), store_(smem, p.store, consumer) {}

  // Before the k loop: asks for the scale, which is there when the loop ends.
  __device__ __forceinline__ void begin(gemm::WorkTile const& tile, int, int) {
    scale_ = p_.gmem_scale[tile.segment];
  }

  // After the k loop, 64 rows from `row`; indices are constants after unrolling, so that all stays in registers.
  __device__ __forceinline__ void keep(gemm::Accumulators<kGemm>& acc, gemm::WorkTile const& tile,
                                       int row) {
    TESSERA_UNROLL
    for (int group = 0; group < kGemm.column_groups(); ++group) {
      TESSERA_UNROLL
      for (int i = 0; i < 64; ++i) acc[group][i] *= scale_;
    }
    store_.keep(acc, tile, row);
  }

  __device__ __forceinline__ void work(int piece) { store_.work(piece); }
  __device__ __forceinline__ void drain() {}

 private:
  Params const& p_;
  gemm::StoreDeferred<kGemm> store_;
  float scale_ = 0;
};

struct ScaledProjectionFwdParams {
  gemm::GemmParams gemm;
  ScaledStoreParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    scaled_projection_fwd(__grid_constant__ ScaledProjectionFwdParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  gemm::run_gemm<Config::gemm, ScaledStore<Config::gemm>>(p.gemm, p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_scaled_projection_fwd_config(DownProjectionFwdArguments const& args,
                                                float const* gmem_scale, int sm_count,
                                                cudaStream_t stream) {
  DownProjectionFwdParams plain;
  cudaError_t const error = make_down_projection_fwd_params<Config>(plain, args);
  if (error != cudaSuccess) return error;
  ScaledProjectionFwdParams const params{plain.gemm, {plain.epilogue, gmem_scale}};
  return host::launch_persistent<scaled_projection_fwd<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(args.gmem_handover !=
                                                                              nullptr),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda::example
