// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of a weight gradient.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <climits>

#include "gemm_params.hpp"
#include "projection_backward.hpp"

namespace tessera::cuda::host {

// Both halves that exist have the same strides.
inline bool alike(WeightRows const (&dw)[2]) {
  return dw[0].gmem == nullptr || dw[1].gmem == nullptr ||
         (dw[0].row_stride == dw[1].row_stride && dw[0].column_stride == dw[1].column_stride &&
          dw[0].block == dw[1].block && dw[0].block_stride == dw[1].block_stride);
}

// kGemm: a gemm::GemmConfig; kRowsMajor: dW is contiguous along n. GemmParams, StoreParams: gemm::GemmParams and
// gemm::WgradStoreParams. box_columns: of d, in a box that is stored.
template <auto kGemm, bool kRowsMajor, class GemmParams, class StoreParams>
cudaError_t make_wgrad_params(GemmParams& gemm, StoreParams& out, WgradArguments const& args,
                              uint32_t box_columns = 64) {
  int64_t const d = args.hidden;
  int64_t const n = args.intermediate;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  out = {};
  then(gemm_params<kGemm>(gemm, {.a = args.left,
                                 .gmem_index = args.gmem_gather_index,
                                 .gmem_right = args.gmem_right,
                                 .right_rows = args.rows,
                                 .right_halves = args.halves,
                                 .m = d,
                                 .n = n,
                                 .gmem_offsets = args.gmem_expert_offsets,
                                 .segments = args.experts,
                                 .gmem_tile_counter = args.gmem_tile_counter,
                                 .gmem_handover = args.gmem_handover}));
  for (int half = 0; half < args.halves; ++half) {
    WeightRows const& dw = args.dw[half];
    if (dw.gmem == nullptr) continue;
    auto& to = out.halves[half];
    to.gmem = static_cast<__nv_bfloat16*>(const_cast<void*>(dw.gmem));
    to.segment_stride = dw.expert_stride;
    to.row_stride = dw.row_stride;
    to.column_stride = dw.column_stride;
    to.block_stride = dw.block_stride;
    to.block = dw.block >= n ? INT_MAX : int(dw.block);
    to.exists = true;
    if (!kGemm.defers() || args.is_fp32)
      then(make_weight_map(to.map, dw, args.experts, n, d, kRowsMajor, args.is_fp32, box_columns));
  }
  if (kGemm.defers() && !args.is_fp32) {
    using Steps = decltype(out.steps);
    if (!alike(args.dw)) return cudaErrorInvalidValue;
    WeightRows const& dw = args.dw[args.dw[0].gmem != nullptr ? 0 : 1];
    int const shift = dw.block >= n ? 6 : std::min(std::countr_zero(unsigned(dw.block)), 6);
    auto const bytes = [&](int i) {
      return 2 * ((i >> shift) * dw.block_stride + (i & ((1 << shift) - 1)) * dw.row_stride);
    };
    out.steps = {.row = 2 * dw.row_stride,
                 .column = 2 * dw.column_stride,
                 .block = 2 * dw.block_stride,
                 .block_shift = shift,
                 .second_row = bytes(Steps::kSecondRow),
                 .second_piece = bytes(Steps::kPieceRows)};
  }
  out.rows = int(n);
  out.columns = int(d);
  out.num_halves = args.halves;
  out.half_groups = gemm.b_half_groups;
  out.accumulates = args.accumulates;
  return error;
}

}  // namespace tessera::cuda::host
