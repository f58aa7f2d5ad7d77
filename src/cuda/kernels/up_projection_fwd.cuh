// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd: h = x[gather_index] @ w_up[e]^T, a = silu(h gate) * h up; h is kept for backward.
// Shapes   x (T,d) bf16, w_up (E,2n,d) with gate and up rows where HalvesLayout says, h (R,2n) as
//          [gate half | up half], a (R,n)
// Work     4*R*n*d FLOP; bytes: x T*d..R*d, w_up 2*E*n*d, h 2*R*n, a R*n, 2 each; compute bound from
//          n = 256 on (184 FLOP per byte is the balance point)
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), n_tiles fastest in groups of
//          8: a wave of CTAs then reads about as many x rows as w_up rows (tile_scheduler.cuh)
//   WG0 producer    | fill s0 | fill s1 | fill s2 | fill s3 | next tile: fill s0  (wait empty, arrive full)
//   WG1,2 consumers |         | mma s0  | mma s1  | mma s2  | mma s3 | epilogue   (wait full, arrive empty)
//   fill = TMA w_up + rows of x by TMA (already sorted) or cp.async gather (TMA gather needs Blackwell)
//   epilogue = swiglu, stmatrix, ragged TMA store of 64x64 slabs
// Barriers full, empty [stages] and named ones: arrival counts and ids in gemm_config.hpp
// Numerics fp32 accumulate, one rounding each for h and a (a from the unrounded h); bitwise
//          repeatable: yes, the tile counter decides who computes a tile, not how
// Requires d % 64 == 0, n % 8 == 0, 16-byte aligned rows, E <= 640, T*d < 2^35
#pragma once

#include "../block/epilogue/swiglu.cuh"
#include "../block/gemm.cuh"
#include "../host/launch.hpp"
#include "../host/tensor_map.hpp"

namespace tessera::cuda {

// A config is a type with `static constexpr block::GemmConfig gemm` and `block::Sigmoid sigmoid`.
struct UpProjectionParams {
  block::GemmParams gemm;
  block::SwigluParams epilogue;
};

template <class Config>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_fwd(__grid_constant__ UpProjectionParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(block::valid(Config::gemm));
  using Epilogue = block::SwigluEpilogue<Config::gemm, Config::sigmoid>;
  auto& smem = block::shared_storage<Config::gemm>();
  block::set_up<Config::gemm>(smem, p.gemm);
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    block::produce<Config::gemm>(smem, p.gemm);
  } else {
    block::consume<Config::gemm, Epilogue>(smem, p.gemm, p.epilogue, warpgroup - 1);
  }
  // Peers arrive on this CTA's barriers until they have finished.
  if constexpr (Config::gemm.cluster_m > 1) arch::cluster_sync();
#endif
}

struct UpProjectionArguments {
  void const* gmem_x;       // (T, d), or (R, d) already in expert order for ALoader::kTma
  int64_t x_rows;           // T, or capacity of the sorted rows
  int const* gather_index;  // [P]; null for ALoader::kTma
  void const* gmem_w_up;
  block::bf16* gmem_h;  // (rows, 2n)
  block::bf16* gmem_a;  // (rows, n)
  int64_t rows;         // capacity P of h and a, >= R
  int const* expert_offsets;
  int* tile_counter;  // one int, 0 at the first launch; launches that overlap need one each
  int experts, hidden, intermediate;
};

template <class Config>
constexpr host::PersistentShape persistent_shape() {
  return {Config::gemm.threads(), Config::gemm.cluster_m,
          int(sizeof(block::SharedStorage<Config::gemm>))};
}

// w_up as [E, 2n, d], gate rows first ("concat").
template <class Config>
cudaError_t make_up_projection_params(UpProjectionParams& p, UpProjectionArguments const& args) {
  constexpr block::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden;
  int64_t const n = args.intermediate;
  if (d % kGemm.tile.k || n % 8 || args.experts > block::kMaxSegments) return cudaErrorInvalidValue;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  p = {};
  if constexpr (!kGemm.gathers()) {
    then(host::make_matrix_map(p.gemm.a, args.gmem_x, args.x_rows, d, block::kSubtileM));
  }
  then(host::make_halves_map(p.gemm.b, args.gmem_w_up, args.experts, 2, n, d, {d, n * d, 2 * n * d},
                             kGemm.b_box_halves(), kGemm.b_box_n()));
  then(host::make_ragged_store_map(p.epilogue.h, args.gmem_h, args.rows, 2, n, args.rows,
                                   block::kSubtileM));
  then(host::make_ragged_store_map(p.epilogue.a, args.gmem_a, args.rows, 1, n, args.rows,
                                   block::kSubtileM));
  p.epilogue.ragged_extent = int(args.rows);
  p.gemm.gmem_a = args.gmem_x;
  p.gemm.gmem_index = args.gather_index;
  p.gemm.a_pitch_chunks = int(d / 8);
  p.gemm.gmem_offsets = args.expert_offsets;
  p.gemm.gmem_tile_counter = args.tile_counter;
  p.gemm.segments = args.experts;
  p.gemm.n_tiles = int((n + kGemm.tile.n / 2 - 1) / (kGemm.tile.n / 2));
  p.gemm.k_tiles = int(d / kGemm.tile.k);
  return error;
}

template <class Config>
cudaError_t launch_up_projection_fwd(UpProjectionParams const& params, int clusters,
                                     cudaStream_t stream) {
  return host::launch_persistent(up_projection_fwd<Config>, persistent_shape<Config>(), clusters,
                                 params, stream);
}

}  // namespace tessera::cuda
