// SPDX-License-Identifier: Apache-2.0
// The GEMMs of a layer's forward pass: router_logits, up_projection_fwd, down_projection_fwd.
// Host side: the calls' arguments, which are the plain twins' kernel parameters too, the launchers, and why a
// fast kernel does not serve a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tessera/shape.hpp"

namespace tessera::cuda {

/// Rows i of one logical matrix per expert inside a weight tensor of bf16, whatever its layout. Row i of expert e
/// starts at gmem + e*expert_stride + (i / block)*block_stride + (i % block)*row_stride (elements); its element c
/// is c*column_stride further.
///   concat, up-first, separate, transposed   one block of all rows
///   interleaved                              one block, row_stride 2 rows
///   blocked B                                blocks of B rows, block_stride 2B rows
struct WeightRows {
  void const* gmem = nullptr;
  int64_t expert_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;  // 1: K-major; else row_stride is 1 or, transposed and interleaved, 2
  int64_t block = 0;
  int64_t block_stride = 0;

  __host__ __device__ int64_t row_offset(int64_t expert, int64_t row) const {
    int64_t const start = expert * expert_stride;
    return row < block ? start + row * row_stride
                       : start + row / block * block_stride + row % block * row_stride;
  }
};

/// The rows x columns matrix of `w`, which has one block, as its transpose: column c of `w` is row c, of `columns`.
inline WeightRows transposed(WeightRows const& w, int64_t columns) {
  return {.gmem = w.gmem,
          .expert_stride = w.expert_stride,
          .row_stride = w.column_stride,
          .column_stride = w.row_stride,
          .block = columns};
}

/// Both halves of `w`, columns 2i and 2i + 1 of a transposed matrix each, as that matrix: row 2i is gate's i.
inline WeightRows joined(WeightRows const (&w)[2]) {
  WeightRows out = w[0];
  out.row_stride /= 2;
  out.block *= 2;
  return out;
}

/// x (rows,columns) bf16, or what is said; columns contiguous.
struct MatrixRows {
  void const* gmem = nullptr;
  int64_t rows = 0;
  int64_t pitch = 0;  // elements from one row to the next
};

/// Up to so many tokens w_router is read by a kernel that multiplies no tiles.
/// bench/results/archive/h200/2026-11-22-gemv.json
constexpr int64_t kGemvTokens = 8;

/// l = x w_router^T + b_router, fp32 sums, not rounded.
struct RouterLogitsArguments {
  MatrixRows x;               // (T,d)
  MatrixRows w_router;        // (E,d)
  void const* gmem_b_router;  // (E) as w_router, or null
  float* gmem_logits;         // (T,E), every element is written
  int64_t hidden;             // d
  int32_t experts;            // E
  bool is_fp32 = false;       // of w_router and b_router, else bf16
  /// Workspace for an fp32 w_router as terms (split_fp32.hpp), which the GEMM needs: E * router_terms_pitch(d) bf16.
  void* gmem_terms = nullptr;
};

/// h_r = rnd(x[gather_index[r]] w_up[e]^T + b_up[e]), a_r = rnd(act(h_r)), r in the rows of expert e.
struct UpProjectionFwdArguments {
  MatrixRows x;                        // (T,d)
  int32_t const* gmem_gather_index;    // (P) row -> row of x; null: row r of x
  int32_t const* gmem_expert_offsets;  // (E+1); rows from the last one on: neither read nor written
  WeightRows w_up[2];                  // gate, up (n rows of d each); not gated: [0] only
  WeightRows b_up[2];                  // the same of one column; gmem null: no bias
  /// w_up is joined() of its halves, and h is stored as its columns are: [g0 u0 g1 u1 ..]. Gated.
  bool interleaved = false;
  Activation activation;
  void* gmem_h;                  // (P,w*n) bf16 as [gate half | up half]; null: not stored
  void* gmem_a;                  // (P,n) bf16; null: not stored
  int64_t rows;                  // P >= R
  int64_t hidden, intermediate;  // d, n
  int32_t experts;               // E
  int32_t* gmem_tile_counter;    // one int, 0 before and after every launch
  /// Handover word, 0 at launch: says to the next kernel, down_projection_fwd, which experts it may read. Null: none.
  uint32_t* gmem_handover = nullptr;
};

/// y_r = rnd(a_r w_down[e]^T + b_down[e]).
struct DownProjectionFwdArguments {
  void const* gmem_a;                  // (P,n) bf16
  int32_t const* gmem_expert_offsets;  // (E+1)
  WeightRows w_down;                   // d rows of n
  WeightRows b_down;                   // gmem null: no bias
  void* gmem_y;                        // (P,d) bf16
  int64_t rows;                        // P >= R
  int64_t hidden, intermediate;        // d, n
  int32_t experts;                     // E
  int32_t* gmem_tile_counter;          // one int, 0 before and after every launch
  /// The handover word of the up_projection_fwd launched just before, in whose tail this one starts. Null: it starts
  /// after it.
  uint32_t* gmem_handover = nullptr;
};

/// Counts the experts, the first ones, that a kernel hands over before its end. The last quarter is far more than what
/// runs at the end.
constexpr int32_t experts_handed_over(int32_t experts) {
  return static_cast<int32_t>(int64_t{experts} * 3 / 4);
}

/// Why the fast kernel does not serve a call ("n=100: rows of 16 bytes need a multiple of 8"); empty where it does.
/// It judges sizes, strides and alignment and reads no memory: `explain` asks with made-up addresses.
struct Refusal {
  char text[128] = "";
  [[nodiscard]] bool refused() const { return text[0] != '\0'; }
};

/// The fast kernels, for calls that refuse() of layer/select.hpp lets pass: launch on `stream`; allocate nothing, wait
/// for nothing.
cudaError_t launch_router_logits(RouterLogitsArguments const& args, int sm_count,
                                 cudaStream_t stream);
cudaError_t launch_up_projection_fwd(UpProjectionFwdArguments const& args, int sm_count,
                                     cudaStream_t stream);
cudaError_t launch_down_projection_fwd(DownProjectionFwdArguments const& args, int sm_count,
                                       cudaStream_t stream);

/// For few tokens: a warp per expert.
cudaError_t launch_router_logits_gemv(RouterLogitsArguments const& args, cudaStream_t stream);

/// One thread per output, fp32 sums in order of the reduction; any size, stride, alignment and activation.
cudaError_t launch_router_logits_plain(RouterLogitsArguments const& args, cudaStream_t stream);
cudaError_t launch_up_projection_fwd_plain(UpProjectionFwdArguments const& args,
                                           cudaStream_t stream);
cudaError_t launch_down_projection_fwd_plain(DownProjectionFwdArguments const& args,
                                             cudaStream_t stream);

}  // namespace tessera::cuda
