// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of MXFP8 operands on sm_100a: y = rnd(a8 w8_down[e]^T), one row per (token, expert) pair.
// Compiled and emulated, never run on hardware.
// Shapes   a8 (P,n) e4m3 with scales (P,n/32), w8_down (E,d,n) with atoms of scales (E,scale_atom_bytes(d, n/32)); y
//          (P,d) bf16
// Work     2*R*n*d FLOP; bytes: a8 R*n, w8_down E*n*d, y 2*R*d, and 1/32 of the first two in scales
// Schedule that of up_projection_fwd_mxfp8.cuh; rows of a8 lie in the order of experts, and are copied as gathered ones
//          are, since their scales have to be: a tile may begin at any row
// Barriers as there
// Numerics 32 products, scaled and added in fp32; one rounding; bitwise repeatable: yes
// Requires d, n multiples of 128; no bias     Doc docs/kernels/blackwell.md
#pragma once

#include "../mxfp8/sorted_rows.cuh"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    down_projection_fwd_mxfp8(__grid_constant__ mxfp8::SortedRowsParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  mxfp8::run_sorted_rows<Config::gemm>(p);
#endif
}

template <class Config>
cudaError_t launch_down_projection_fwd_mxfp8_config(DownProjectionFwdMxfp8Arguments const& args,
                                                    int sm_count, cudaStream_t stream) {
  return mxfp8::launch_sorted_rows<down_projection_fwd_mxfp8<Config>, Config::gemm>(
      {.gmem_a = args.gmem_a,
       .gmem_a_scales = args.gmem_a_scales,
       .gmem_expert_offsets = args.gmem_expert_offsets,
       .gmem_b = args.gmem_w_down,
       .gmem_b_scales = args.gmem_w_down_scales,
       .rows = args.rows,
       .n = args.hidden,
       .k = args.intermediate,
       .experts = args.experts,
       .gmem_tile_counter = args.gmem_tile_counter},
      args.gmem_y, args.hidden, args.intermediate, sm_count, stream);
}

}  // namespace tessera::cuda
