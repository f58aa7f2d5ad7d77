// SPDX-License-Identifier: Apache-2.0
// The GEMMs of a layer's backward pass: down_projection_dgrad, up_projection_dgrad, down_projection_wgrad,
// up_projection_wgrad. Host side: the calls' arguments, which are the plain twins' kernel parameters too, and the
// launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/awaited_rows.hpp"
#include "projection.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

/// ds is summed over n in groups of this many columns, first inside a group, then over the groups in order.
constexpr int64_t kScoreGroup = 128;
__host__ __device__ constexpr int64_t score_groups(int64_t intermediate) {
  return (intermediate + kScoreGroup - 1) / kScoreGroup;
}

/// t_r = dO[gather_index[r]] w_down[e] (fp32, never stored); with the recomputed a_r = act(h_r) and s the score of row
/// r: ds_r = <t_r, a_r>, dh_r = rnd(J_act(h_r)^T s t_r), a'_r = rnd(s a_r).
struct DownProjectionDgradArguments {
  MatrixRows d_o;                      // (T,d)
  int32_t const* gmem_gather_index;    // (P) row -> row of d_o; null: row r of d_o
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  WeightRows w_down;                   // d rows of n
  float const* gmem_scores;            // (P) by slot
  int32_t const* gmem_sort_permutation;  // (P) row -> slot
  void const* gmem_h;                    // (P,w*n) bf16 as [gate half | up half]
  bool interleaved = false;              // h and dh are [g0 u0 g1 u1 ..]
  Activation activation;
  void* gmem_dh;                 // (P,w*n) bf16 as h
  void* gmem_a_scaled;           // (P,n) bf16; null: not stored
  float* gmem_ds_partials;       // (P,score_groups(n)) by row; null: not stored
  int64_t rows;                  // P >= R
  int64_t hidden, intermediate;  // d, n
  int32_t experts;               // E
  int32_t* gmem_tile_counter;    // one int, 0 before and after every launch
  /// Handover word, 0 at launch: says to the next kernel, down_projection_wgrad, whose a' it may read. Null: none.
  uint32_t* gmem_handover = nullptr;
  core::AwaitedRows awaited =
      {};  // of d_o, by row; without a handover. Kernels of sm_90 alone take it
};

/// dx row r = rnd(dh_r w_up[e]), the sum over both halves.
struct UpProjectionDgradArguments {
  void const* gmem_dh;                      // (P,w*n) bf16 as [gate half | up half]
  int32_t const* gmem_expert_offsets;       // (E+1)
  WeightRows w_up[2];                       // gate, up (n rows of d each); not gated: [0] only
  float const* gmem_row_dlogits = nullptr;  // (P) dlogit of each row; null: no router's part
  MatrixRows w_router{};                    // (E,d), read with row_dlogits
  /// w_router is (3E,d), the terms of an fp32 one (split_weights_for_dgrad), of which each expert's first two are read.
  bool router_in_terms = false;
  bool gated;
  void* gmem_dx_rows;            // (P,d) bf16
  int64_t rows;                  // P >= R
  int64_t hidden, intermediate;  // d, n
  int32_t experts;               // E
  int32_t* gmem_tile_counter;    // one int, 0 before and after every launch
  /// dh may come of the previous kernel of the stream, which ends while this one starts; false: only row_dlogits may.
  bool waits_first = true;
};

/// dW[half][e](i, c) = sum over rows r of expert e, ascending, of right[r, half*n + i] * left[gather_index[r], c],
/// i < n, c < d: dw_down with left = dO, right = a'; dw_up with left = x, right = dh.
struct WgradArguments {
  MatrixRows left;                     // (T,d)
  int32_t const* gmem_gather_index;    // (P) row -> row of left; null: row r
  int32_t const* gmem_expert_offsets;  // (E+1)
  void const* gmem_right;              // (P,halves*n) bf16
  int halves;                          // 2: gate and up
  WeightRows dw[2];                    // each n rows of d, written; gmem null: the half is skipped
  bool is_fp32;                        // of dw, else bf16
  bool accumulates;  // adds the complete fp32 sum once, experts without rows are left as they are;
                     // else overwrites, experts without rows get zeros
  int64_t rows;      // P >= R
  int64_t hidden, intermediate;  // d, n
  int32_t experts;               // E
  int32_t* gmem_tile_counter;    // one int, 0 before and after every launch
  bool starts_early =
      false;  // while the previous kernel of the stream ends: it makes nothing that is read here
  /// The handover word of the kernel launched just before, which makes `right`: this one starts in its tail. Null: it
  /// starts after it.
  uint32_t* gmem_handover = nullptr;
};
struct DownProjectionWgradArguments : WgradArguments {};
struct UpProjectionWgradArguments : WgradArguments {};

/// The fast kernels, for calls that refuse() of layer/select.hpp lets pass: launch on `stream`; allocate nothing, wait
/// for nothing.
cudaError_t launch_down_projection_dgrad(DownProjectionDgradArguments const& args, int sm_count,
                                         cudaStream_t stream);
cudaError_t launch_up_projection_dgrad(UpProjectionDgradArguments const& args, int sm_count,
                                       cudaStream_t stream);
cudaError_t launch_down_projection_wgrad(DownProjectionWgradArguments const& args, int sm_count,
                                         cudaStream_t stream);
cudaError_t launch_up_projection_wgrad(UpProjectionWgradArguments const& args, int sm_count,
                                       cudaStream_t stream);

/// One thread per output (of dgrad: one CTA per row and score group), fp32 sums in order of the reduction; any size,
/// stride, alignment and activation.
cudaError_t launch_down_projection_dgrad_plain(DownProjectionDgradArguments const& args,
                                               cudaStream_t stream);
cudaError_t launch_up_projection_dgrad_plain(UpProjectionDgradArguments const& args,
                                             cudaStream_t stream);
cudaError_t launch_wgrad_plain(WgradArguments const& args, cudaStream_t stream);

/// Returns, on the stream, when all rows are there: ahead of kernels that cannot wait for them by themselves.
cudaError_t launch_await_rows_plain(core::AwaitedRows const& rows, cudaStream_t stream);

}  // namespace tessera::cuda
