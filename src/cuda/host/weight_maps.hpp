// SPDX-License-Identifier: Apache-2.0
// B of a GEMM kernel from weights: one map for the usual layouts, otherwise one per half.
#pragma once

#include <climits>

#include "tensor_map.hpp"

namespace tessera::cuda::host {

// Params: gemm::GemmParams; kGemm: its gemm::GemmConfig. Each half has `rows` x `columns` per segment.
template <auto kGemm, class Params>
cudaError_t make_weight_maps(Params& p, WeightRows const (&w)[2], int64_t segments, int64_t rows,
                             int64_t columns) {
  bool const rows_major = w[0].column_stride != 1;
  p.b_block = w[0].block >= rows ? INT_MAX : int(w[0].block);
  p.b_in_boxes = !has_tile_map(w, kGemm.b_halves(), rows);
  p.b_groups = existing_b_groups<kGemm>(rows);
  int const box_groups = kGemm.partial_last() ? kGemm.b_groups_per_cta() : p.b_groups;
  if (p.b_in_boxes && !kGemm.any_b_layout()) return cudaErrorInvalidValue;
  if (!p.b_in_boxes) {
    cudaError_t const error =
        make_tile_map(p.b[0], w, kGemm.b_halves(), segments, rows, columns, rows_major, box_groups);
    if (error != cudaSuccess || !kGemm.partial_last()) return error;
  }
  for (int half = 0; half < kGemm.b_halves(); ++half) {
    cudaError_t const error =
        make_weight_map(p.b_half[half], w[half], segments, rows, columns, rows_major);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// B whose k runs through the halves: each is `rows` x `columns` per segment, with a map of its own.
template <auto kGemm, class Params>
cudaError_t make_k_half_maps(Params& p, WeightRows const (&w)[2], int halves, int64_t segments,
                             int64_t rows, int64_t columns) {
  bool const rows_major = w[0].column_stride != 1;
  p.b_block = w[0].block >= rows ? INT_MAX : int(w[0].block);
  WeightRows const each[2][2] = {{w[0], {}}, {w[1], {}}};
  p.b_in_boxes = !has_tile_map(each[0], 1, rows);
  p.b_groups = existing_b_groups<kGemm>(rows);
  for (int half = 0; half < halves; ++half) {
    cudaError_t error = cudaSuccess;
    if (!p.b_in_boxes) {
      error = make_tile_map(p.b[half], each[half], 1, segments, rows, columns, rows_major,
                            kGemm.b_groups_per_cta());
    }
    if (error == cudaSuccess && (p.b_in_boxes || kGemm.partial_last())) {
      error = make_weight_map(p.b_half[half], w[half], segments, rows, columns, rows_major);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace tessera::cuda::host
