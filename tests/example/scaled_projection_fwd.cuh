// SPDX-License-Identifier: Apache-2.0
// scaled_projection_fwd: y = scale[e] * (a @ w_down[e]^T) + b_down[e], one row per (token, expert) pair. A kernel to
// copy: down_projection_fwd with one elementwise epilogue more. The walk is docs/add-a-kernel.md.
// Shapes   as down_projection_fwd; scale (E) fp32
// Work     as down_projection_fwd, and R*d multiplications: tile.n/2 a thread and tile, in registers
// Schedule, barriers as down_projection_fwd
// Numerics fp32 accumulate, scale and bias, one rounding; bitwise repeatable: yes
// Requires as down_projection_fwd; scale for every expert
#pragma once

#include "cuda/epilogue/store.cuh"
#include "cuda/gemm/sm90/roles.cuh"
#include "cuda/host/gemm_params.hpp"
#include "cuda/host/launch.hpp"
#include "cuda/host/projection.hpp"

namespace tessera::cuda::example {

struct ScaledStoreParams {
  gemm::StoreParams store;
  float const* gmem_scale;  // (E)
};

// The epilogue: accumulators times the segment's scale, then what StoreDeferred does with them. It is deferred, so that
// GEMM configurations whose epilogue has that mode can take it; a hook that changes nothing is handed on by name.
template <class Core>
class ScaledStore {
 public:
  static constexpr gemm::EpilogueMode kMode = gemm::EpilogueMode::kDeferred;
  using Params = ScaledStoreParams;

  __device__ __forceinline__ ScaledStore(typename Core::Storage& smem, Params const& p,
                                         int consumer)
      : p_(p), store_(smem, p.store, consumer) {}

  // Before the k loop: asks for the scale, which is there when the loop ends.
  __device__ __forceinline__ void begin(gemm::WorkTile const& tile, int row, int subtiles) {
    scale_ = p_.gmem_scale[tile.segment];
    store_.begin(tile, row, subtiles);
  }

  // After the k loop it gets 64 rows from `row` and scales them; nothing says which thread has which value.
  __device__ __forceinline__ void keep(typename Core::Accumulators& acc, gemm::WorkTile const& tile,
                                       int row) {
    acc.for_each(row, 0, [&](int /*row*/, int /*column*/, float& value) { value *= scale_; });
    store_.keep(acc, tile, row);
  }

  __device__ __forceinline__ void work(int piece) { store_.work(piece); }
  __device__ __forceinline__ void drain() { store_.drain(); }

 private:
  Params const& p_;
  gemm::StoreDeferred<Core> store_;
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
  gemm::run_gemm<Config::gemm, ScaledStore<gemm::sm90::Core<Config::gemm>>>(p.gemm, p.epilogue);
#endif
}

// The GEMM in elements, and what the epilogue stores. Kernels do not include each other: each states its own.
template <class Config>
cudaError_t make_scaled_projection_fwd_params(ScaledProjectionFwdParams& p,
                                              DownProjectionFwdArguments const& args,
                                              float const* gmem_scale) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  static_assert(kGemm.defers());
  int64_t const d = args.hidden;
  p = {};
  p.epilogue.store.bias = {static_cast<gemm::bf16 const*>(args.b_down.gmem),
                           args.b_down.expert_stride, int(args.b_down.row_stride)};
  p.epilogue.store.gmem_d = static_cast<gemm::bf16*>(args.gmem_y);
  p.epilogue.store.columns = int(d);
  p.epilogue.gmem_scale = gmem_scale;
  return host::gemm_params<kGemm>(p.gemm, {.a = {args.gmem_a, args.rows, args.intermediate},
                                           .b = {args.w_down, {}},
                                           .n = d,
                                           .k = args.intermediate,
                                           .gmem_offsets = args.gmem_expert_offsets,
                                           .segments = args.experts,
                                           .gmem_tile_counter = args.gmem_tile_counter,
                                           .gmem_handover = args.gmem_handover});
}

template <class Config>
cudaError_t launch_scaled_projection_fwd_config(DownProjectionFwdArguments const& args,
                                                float const* gmem_scale, int sm_count,
                                                cudaStream_t stream) {
  ScaledProjectionFwdParams params;
  cudaError_t const error = make_scaled_projection_fwd_params<Config>(params, args, gmem_scale);
  if (error != cudaSuccess) return error;
  return host::launch_persistent<scaled_projection_fwd<Config>>(
      host::persistent_shape<Config::gemm, gemm::SharedStorage<Config::gemm>>(args.gmem_handover !=
                                                                              nullptr),
      gemm::most_tiles<Config::gemm>(params.gemm, args.rows), sm_count, params, stream);
}

}  // namespace tessera::cuda::example
