// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of MXFP8 operands on sm_100a: t = dO8[gather_index] w8_down[e] stays in tensor memory; with s
// the row's score and h the values of its codes
//   ds partial = <t, act(h)>,  dh = rnd(J_act(h)^T (s t)), in bf16 and as codes,  a' = rnd(s act(h))
// Compiled and emulated, never run on hardware.
// Shapes   dO8 (T,d) e4m3 with scales (T,d/32), w8_down transposed, (E,n,d), with atoms of scales
//          (E,scale_atom_bytes(n, d/32)); h8 and dh8 (P,2n) with scales (P,2n/32), dh (P,2n) bf16, a' (P,n) bf16, ds
//          partials (P,n/128) fp32
// Work     2*R*n*d FLOP; bytes: dO8 T*d..R*d, w8_down E*n*d, h8 2*R*n, dh 4*R*n, dh8 2*R*n, a' 2*R*n, and 1/32 of
//          those of codes
// Schedule that of up_projection_fwd_mxfp8.cuh, with tiles of 128 columns of n; the epilogue's codes of h come by TMA
//          under the k loop
// Barriers full, gathered, empty, acc_full, acc_empty, work_full, work_empty, loads: gemm/sm100/storage.cuh
// Numerics 32 products, scaled and added in fp32; activation in fp32, one rounding per stored value; a thread adds up
//          ds in the order of columns; bitwise repeatable: yes
// Requires d, n multiples of 128; gated     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/activation_gradient_rows_mxfp8.cuh"
#include "../host/tensor_map.hpp"
#include "../mxfp8/launch.cuh"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `ActivationKind activation`.
struct DownProjectionDgradMxfp8Params {
  gemm::MxGemmParams gemm;
  gemm::ActivationGradientRowsMxfp8Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    down_projection_dgrad_mxfp8(__grid_constant__ DownProjectionDgradMxfp8Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Core = gemm::TensorMemoryCore<Config::gemm>;
  using Epilogue = gemm::ActivationGradientRowsMxfp8<Core, Config::activation>;
  gemm::run_gemm_in_tensor_memory<Config::gemm, Epilogue>(p.gemm, p.epilogue);
#endif
}

// Maps of what the epilogue reads and writes.
inline cudaError_t make_down_projection_dgrad_mxfp8_maps(
    gemm::ActivationGradientRowsMxfp8Params& p, DownProjectionDgradMxfp8Arguments const& args) {
  using host::MapElement;
  int64_t const n = args.intermediate, rows = args.rows;
  cudaError_t error =
      host::make_halves_map(p.h, args.gmem_h, rows, 2, n, gemm::kWarpSlabRows, MapElement::kE4m3);
  auto const store = [&](CUtensorMap& map, void* gmem, int halves, MapElement element) {
    if (gmem == nullptr) return false;
    if (error == cudaSuccess) {
      error = host::make_ragged_store_map(map, gmem, rows, halves, n, rows, gemm::kWarpSlabRows, 0,
                                          element);
    }
    return true;
  };
  p.stores_dh8 = store(p.dh8, args.gmem_dh8, 2, MapElement::kE4m3);
  p.stores_dh = store(p.dh, args.gmem_dh, 2, MapElement::kBf16);
  p.stores_a = store(p.a_scaled, args.gmem_a_scaled, 1, MapElement::kBf16);
  p.ragged_extent = int(rows);
  return error;
}

template <class Config>
cudaError_t launch_down_projection_dgrad_mxfp8_config(DownProjectionDgradMxfp8Arguments const& args,
                                                      int sm_count, cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, n = args.intermediate;
  if (d % kMxTile != 0 || n % kMxTile != 0 || args.activation.kind != Config::activation) {
    return cudaErrorInvalidValue;
  }
  DownProjectionDgradMxfp8Params p;
  p.epilogue = {};
  p.epilogue.gmem_h_scales = static_cast<uint8_t const*>(args.gmem_h_scales);
  p.epilogue.gmem_dh8_scales = static_cast<uint8_t*>(args.gmem_dh8_scales);
  p.epilogue.gmem_partials = args.gmem_ds_partials;
  p.epilogue.gmem_scores = args.gmem_scores;
  p.epilogue.gmem_permutation = args.gmem_sort_permutation;
  p.epilogue.activation = args.activation;
  p.epilogue.columns = int(n);
  cudaError_t error = make_down_projection_dgrad_mxfp8_maps(p.epilogue, args);
  if (error == cudaSuccess) {
    error = mxfp8::gemm_params<kGemm>(p.gemm, {.gmem_a = args.gmem_d_o,
                                               .gmem_a_scales = args.gmem_d_o_scales,
                                               .gmem_gather_index = args.gmem_gather_index,
                                               .gmem_expert_offsets = args.gmem_expert_offsets,
                                               .gmem_b = args.gmem_w_down_t,
                                               .gmem_b_scales = args.gmem_w_down_t_scales,
                                               .rows = args.rows,
                                               .n = n,
                                               .k = d,
                                               .experts = args.experts,
                                               .gmem_tile_counter = args.gmem_tile_counter});
  }
  if (error != cudaSuccess) return error;
  return mxfp8::launch<down_projection_dgrad_mxfp8<Config>, kGemm>(p, args.rows, sm_count, stream);
}

}  // namespace tessera::cuda
