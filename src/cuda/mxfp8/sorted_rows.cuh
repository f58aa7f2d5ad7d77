// SPDX-License-Identifier: Apache-2.0
// Rows in the order of experts times the weights of their experts, rounded to bf16: down_projection_fwd_mxfp8 and
// up_projection_dgrad_mxfp8 are this. Compiled and emulated, never run on hardware.
#pragma once

#include "../epilogue/store_rows.cuh"
#include "../host/tensor_map.hpp"
#include "launch.cuh"

namespace tessera::cuda::mxfp8 {

struct SortedRowsParams {
  gemm::MxGemmParams gemm;
  gemm::StoreRowsParams epilogue;
};

template <gemm::GemmConfig kGemm>
__device__ __forceinline__ void run_sorted_rows(SortedRowsParams const& p) {
  using Epilogue = gemm::StoreRows<gemm::TensorMemoryCore<kGemm>>;
  gemm::run_gemm_in_tensor_memory<kGemm, Epilogue>(p.gemm, p.epilogue);
}

/// gmem_d: (rows,n) bf16. hidden, intermediate: of the layer.
template <auto kKernel, gemm::GemmConfig kGemm>
cudaError_t launch_sorted_rows(Operands const& args, void* gmem_d, int64_t hidden,
                               int64_t intermediate, int sm_count, cudaStream_t stream) {
  if (hidden % kMxTile != 0 || intermediate % kMxTile != 0) return cudaErrorInvalidValue;
  SortedRowsParams p;
  p.epilogue = {};
  p.epilogue.columns = int(args.n);
  p.epilogue.ragged_extent = int(args.rows);
  cudaError_t error = gemm_params<kGemm>(p.gemm, args);
  if (error == cudaSuccess) {
    error = host::make_ragged_store_map(p.epilogue.d, gmem_d, args.rows, 1, args.n, args.rows,
                                        gemm::kWarpSlabRows);
  }
  if (error != cudaSuccess) return error;
  return launch<kKernel, kGemm>(p, args.rows, sm_count, stream);
}

}  // namespace tessera::cuda::mxfp8
