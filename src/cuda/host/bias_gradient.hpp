// SPDX-License-Identifier: Apache-2.0
// Bias gradients: sums over the rows of each expert, db_up of dh, db_down of s*dO, db_router of dlogits.
// Host side: the call's arguments, which are the kernels' parameters too, and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "projection.hpp"

namespace tessera::cuda {

/// Lane l of so many adds up the rows l, l + lanes, .. of an expert, of bf16; then the lanes are added in order.
constexpr int kBiasGradientLanes = 32;

/// db[half][e](i) = sum over rows r of expert e of weight_r * left[gather_index[r], half*columns + i], i < columns.
struct BiasGradientArguments {
  MatrixRows left;                     // (T,halves*columns) bf16 or fp32
  bool left_is_fp32;                   //
  int32_t const* gmem_gather_index;    // (P) row -> row of left; null: row r
  int32_t const* gmem_expert_offsets;  // (E+1); null: one expert, all rows of left
  float const* gmem_scores;  // (P) by slot: weight_r = scores[sort_permutation[r]]; null: 1
  int32_t const* gmem_sort_permutation;  // (P) row -> slot; read with scores
  int halves;                            //
  WeightRows db[2];                      // `columns` rows of one element, written; null: skipped
  bool is_fp32;                          // of db, else bf16
  bool accumulates;                      // as WgradArguments
  int64_t columns;                       //
  int32_t experts;                       // E
};

/// The fast kernel, for calls that refuse() of layer/select.hpp lets pass: 16 bytes of a row a thread.
cudaError_t launch_bias_gradient(BiasGradientArguments const& args, cudaStream_t stream);
/// One CTA per expert and group of columns: its threads take the rows in turn, their sums are added in order.
cudaError_t launch_bias_gradient_plain(BiasGradientArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
