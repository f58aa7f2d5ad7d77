// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of MXFP8 operands on sm_100a: hb = rnd(x8[gather_index] w8_up[e]^T), a = act(hb), both out as codes
// with a scale for every 32 columns. Compiled and emulated, never run on hardware.
// Shapes   x8 (T,d) e4m3 with scales (T,d/32), w8_up (E,2,n,d) with atoms of scales (E,2,scale_atom_bytes(n, d/32)); h8
//          (R,2n) with scales (R,2n/32), a8 (R,n) with scales (R,n/32)
// Work     4*R*n*d FLOP; bytes: x8 T*d..R*d, w8_up 2*E*n*d, h8 2*R*n, a8 R*n, and 1/32 of them in scales
// Schedule persistent, 1 CTA/SM; work tile = (expert, m block, n_tile), 128 rows x (64 gate, 64 up) by one CTA or 256
//          rows by a pair; two accumulators and the scales of every stage in tensor memory
//     warps 4-7  gather   | fill s0 | fill s1 | ..              (wait empty; cp.async of rows and scales, TMA of w8_up)
//     warp 8     multiply | tile 0 k loop | tile 1 k loop | ..  (wait full, acc_empty; commit to empty, acc_full)
//     warps 0-3  epilogue |               | activate, store | ..  (wait acc_full; arrive acc_empty)
// Barriers full, gathered, empty, acc_full, acc_empty, work_full, work_empty: gemm/sm100/storage.cuh
// Numerics 32 products, scaled and added in fp32; hb rounded once; a8 from act(hb) in fp32; bitwise repeatable: yes
// Requires d, n multiples of 128; gated; no bias     Doc docs/kernels/blackwell.md
#pragma once

#include "../epilogue/activation_rows_mxfp8.cuh"
#include "../mxfp8/launch.cuh"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm` and `ActivationKind activation`.
struct UpProjectionFwdMxfp8Params {
  gemm::MxGemmParams gemm;
  gemm::ActivationRowsMxfp8Params epilogue;
};

template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    up_projection_fwd_mxfp8(__grid_constant__ UpProjectionFwdMxfp8Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  using Core = gemm::TensorMemoryCore<Config::gemm>;
  gemm::run_gemm_in_tensor_memory<Config::gemm,
                                  gemm::ActivationRowsMxfp8<Core, Config::activation>>(p.gemm,
                                                                                       p.epilogue);
#endif
}

template <class Config>
cudaError_t launch_up_projection_fwd_mxfp8_config(UpProjectionFwdMxfp8Arguments const& args,
                                                  int sm_count, cudaStream_t stream) {
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  int64_t const d = args.hidden, n = args.intermediate;
  if (d % kMxTile != 0 || n % kMxTile != 0 || args.activation.kind != Config::activation) {
    return cudaErrorInvalidValue;
  }
  UpProjectionFwdMxfp8Params p;
  p.epilogue = {.gmem_h = static_cast<uint8_t*>(args.gmem_h),
                .gmem_h_scales = static_cast<uint8_t*>(args.gmem_h_scales),
                .gmem_a = static_cast<uint8_t*>(args.gmem_a),
                .gmem_a_scales = static_cast<uint8_t*>(args.gmem_a_scales),
                .activation = args.activation,
                .columns = int(n)};
  cudaError_t const error =
      mxfp8::gemm_params<kGemm>(p.gemm, {.gmem_a = args.gmem_x,
                                         .gmem_a_scales = args.gmem_x_scales,
                                         .gmem_gather_index = args.gmem_gather_index,
                                         .gmem_expert_offsets = args.gmem_expert_offsets,
                                         .gmem_b = args.gmem_w_up,
                                         .gmem_b_scales = args.gmem_w_up_scales,
                                         .rows = args.rows,
                                         .n = n,
                                         .k = d,
                                         .experts = args.experts,
                                         .gmem_tile_counter = args.gmem_tile_counter});
  if (error != cudaSuccess) return error;
  return mxfp8::launch<up_projection_fwd_mxfp8<Config>, kGemm>(p, args.rows, sm_count, stream);
}

}  // namespace tessera::cuda
