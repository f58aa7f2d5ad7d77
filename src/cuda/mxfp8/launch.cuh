// SPDX-License-Identifier: Apache-2.0
// Parts that launchers of GEMMs of MXFP8 operands on sm_100a share: a problem's parameters with those of its scales,
// and the launch. Compiled and emulated, never run on hardware.
#pragma once

#include "../gemm/sm100/core.cuh"
#include "../gemm/sm100/roles.cuh"
#include "../host/gemm_params.hpp"
#include "../host/launch.hpp"
#include "../host/mxfp8.hpp"

namespace tessera::cuda::mxfp8 {

/// Rows of codes times the rows of the weights of each expert.
struct Operands {
  void const* gmem_a;                          // (rows,k) e4m3, gathered from by gmem_index
  void const* gmem_a_scales;                   // (rows,k/32)
  int32_t const* gmem_gather_index = nullptr;  // (rows) row -> row of a; null: the row itself
  int32_t const* gmem_expert_offsets;          // (E+1)
  void const* gmem_b;                          // (E,halves,n,k) e4m3
  void const* gmem_b_scales;                   // (E,halves,scale_atom_bytes(n, k/32))
  int64_t rows, n, k;
  int32_t experts;
  int32_t* gmem_tile_counter;
};

template <gemm::GemmConfig kGemm>
cudaError_t gemm_params(gemm::MxGemmParams& out, Operands const& args) {
  out.scales = {.gmem_a = static_cast<uint8_t const*>(args.gmem_a_scales),
                .gmem_b = static_cast<uint8_t const*>(args.gmem_b_scales),
                .b_matrix_bytes = scale_atom_bytes(args.n, args.k / gemm::kMxBlock)};
  return host::gemm_params<kGemm>(out, {.a = {args.gmem_a, args.rows, args.k},
                                        .gmem_index = args.gmem_gather_index,
                                        .b = {{.gmem = args.gmem_b}, {}},
                                        .n = args.n,
                                        .k = args.k,
                                        .gmem_offsets = args.gmem_expert_offsets,
                                        .segments = args.experts,
                                        .gmem_tile_counter = args.gmem_tile_counter});
}

/// Launches a kernel whose `params.gemm` gemm_params() has made.
template <auto kKernel, gemm::GemmConfig kGemm, class Params>
cudaError_t launch(Params const& params, int64_t rows, int sm_count, cudaStream_t stream) {
  return host::launch_persistent<kKernel>({gemm::threads_in_tensor_memory(kGemm), kGemm.cluster_m(),
                                           int(sizeof(gemm::SharedStorage<kGemm>))},
                                          gemm::most_tiles<kGemm>(params.gemm, rows), sm_count,
                                          params, stream);
}

}  // namespace tessera::cuda::mxfp8
