// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of a weight gradient.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <climits>

#include "projection_backward.hpp"
#include "tensor_map.hpp"

namespace tessera::cuda::host {

// Both halves that exist have the same strides.
inline bool alike(WeightRows const (&dw)[2]) {
  return dw[0].gmem == nullptr || dw[1].gmem == nullptr ||
         (dw[0].row_stride == dw[1].row_stride && dw[0].column_stride == dw[1].column_stride &&
          dw[0].block == dw[1].block && dw[0].block_stride == dw[1].block_stride);
}

// kGemm: a gemm::GemmConfig; kRowsMajor: dW is contiguous along n. GemmParams, StoreParams: gemm::GemmParams and
// gemm::WgradStoreParams.
template <auto kGemm, bool kRowsMajor, class GemmParams, class StoreParams>
cudaError_t make_wgrad_params(GemmParams& gemm, StoreParams& out, WgradArguments const& args) {
  constexpr int kGroup = 64;  // columns of dW in a row group of B
  int64_t const d = args.hidden;
  int64_t const n = args.intermediate;
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  gemm = {};
  out = {};
  gemm.b_groups = existing_b_groups<kGemm>(n);
  // Whole column groups: both halves are one matrix.
  gemm.b_in_boxes = n % kGroup != 0;
  if (gemm.b_in_boxes) {
    if (!kGemm.any_b_layout()) return cudaErrorInvalidValue;
    then(make_ragged_load_map(gemm.b_half[0], args.gmem_right, args.rows, args.halves, n,
                              kGemm.tile.k));
  } else {
    then(make_ragged_tile_load_map(gemm.b[0], args.gmem_right, args.rows, args.halves * n,
                                   gemm.b_groups));
  }
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
      then(make_weight_map(to.map, dw, args.experts, n, d, kRowsMajor, args.is_fp32));
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
  out.half_groups = int((n + kGroup - 1) / kGroup);
  out.accumulates = args.accumulates;
  gemm.ragged_extent = kRaggedLoadExtent;
  gemm.b_half_groups = out.half_groups;
  gemm.gmem_a = args.left.gmem;
  gemm.a_pitch_chunks = int(args.left.pitch * 2 / 16);
  gemm.a_row_bytes = int(d * 2);
  gemm.gmem_index = args.gmem_gather_index;
  gemm.gmem_offsets = args.gmem_expert_offsets;
  gemm.gmem_tile_counter = args.gmem_tile_counter;
  gemm.gmem_handover = kGemm.takes_over() ? args.gmem_handover : nullptr;
  gemm.handover_segments = experts_handed_over(args.experts);
  gemm.segments = args.experts;
  constexpr int kTileGroups = kGemm.tile.n / kGroup;
  gemm.m_tiles = int((d + kGemm.tile.m - 1) / kGemm.tile.m);
  gemm.n_tiles = (args.halves * out.half_groups + kTileGroups - 1) / kTileGroups;
  return error;
}

}  // namespace tessera::cuda::host
