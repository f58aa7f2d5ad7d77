// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of MXFP8 operands on sm_100a: dx row = rnd(dh8 w8_up[e]), one row per (token, expert) pair; the
// reduction runs over the gate half, then over the up half. The router's part of dx is not there.
// Compiled and emulated, never run on hardware.
// Shapes   dh8 (P,2n) e4m3 with scales (P,2n/32), w8_up transposed, (E,d,2n), with atoms of scales
//          (E,scale_atom_bytes(d, 2n/32)); dx rows (P,d) bf16
// Work     4*R*n*d FLOP; bytes: dh8 2*R*n, w8_up 2*E*n*d, dx rows 2*R*d, and 1/32 of the first two in scales
// Schedule that of down_projection_fwd_mxfp8.cuh, whose k is 2n here
// Barriers as there
// Numerics 32 products, scaled and added in fp32; one rounding; bitwise repeatable: yes
// Requires d, n multiples of 128; gated     Doc docs/kernels/blackwell.md
#pragma once

#include "../mxfp8/sorted_rows.cuh"

namespace tessera::cuda {

// A config is a type with `static constexpr gemm::GemmConfig gemm`.
template <class Config>
__global__ void __launch_bounds__(gemm::threads_in_tensor_memory(Config::gemm), 1)
    up_projection_dgrad_mxfp8(__grid_constant__ mxfp8::SortedRowsParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
  mxfp8::run_sorted_rows<Config::gemm>(p);
#endif
}

template <class Config>
cudaError_t launch_up_projection_dgrad_mxfp8_config(UpProjectionDgradMxfp8Arguments const& args,
                                                    int sm_count, cudaStream_t stream) {
  return mxfp8::launch_sorted_rows<up_projection_dgrad_mxfp8<Config>, Config::gemm>(
      {.gmem_a = args.gmem_dh,
       .gmem_a_scales = args.gmem_dh_scales,
       .gmem_expert_offsets = args.gmem_expert_offsets,
       .gmem_b = args.gmem_w_up_t,
       .gmem_b_scales = args.gmem_w_up_t_scales,
       .rows = args.rows,
       .n = args.hidden,
       .k = 2 * args.intermediate,
       .experts = args.experts,
       .gmem_tile_counter = args.gmem_tile_counter},
      args.gmem_dx_rows, args.hidden, args.intermediate, sm_count, stream);
}

}  // namespace tessera::cuda
