// SPDX-License-Identifier: Apache-2.0
// From the partial sums of ds to the gradients of the router: dscores, dlogits, dx = dl w_router, dw_router = dl^T x.
// Host side: the calls' arguments, which are the kernels' parameters too, and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "projection.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

/// ds_j = sum of the partials of row r = inverse_permutation[j], in order, + <dO[gather_index[r]], b_down[e]>;
/// 0 where the slot has no row.
struct DscoresArguments {
  float const* gmem_ds_partials;            // (P,groups) by row
  int64_t groups;                           // score_groups(n)
  int32_t const* gmem_inverse_permutation;  // (P) slot -> row; negative: sentinel
  MatrixRows d_o;                           // (T,d); read with a bias, as all below
  int32_t const* gmem_gather_index;         // (P) row -> row of d_o; null: row r
  int32_t const* gmem_expert_offsets;       // (E+1)
  WeightRows b_down;                        // gmem null: no bias
  float* gmem_dscores;                      // (P) by slot, every element is written
  int64_t slots;                            // P
  int64_t hidden;                           // d
  int32_t experts;                          // E
};

/// Replayed ids may name an expert twice: its first slot of the token gets the sum of their dscores, the others id -1.
struct MergeRepeatsArguments {
  int32_t const* gmem_ids;            // (P); negative: sentinel
  float const* gmem_dscores;          // (P)
  int32_t const* gmem_token_offsets;  // (T+1); null: token t owns slots [t*K, (t+1)*K)
  int32_t* gmem_merged_ids;           // (P)
  float* gmem_merged_dscores;         // (P)
  int64_t tokens;                     // T
  int32_t top_k;                      // K; not read with token_offsets
};

/// dlogits of the router's formula (plain/router_dlogits.cu), plus those of other losses.
struct RouterDlogitsArguments {
  float const* gmem_dscores;          // (P)
  int32_t const* gmem_ids;            // (P), distinct within a token; negative: no expert
  int32_t const* gmem_token_offsets;  // (T+1); null: token t owns slots [t*K, (t+1)*K)
  float const* gmem_scores;           // (P)
  float const* gmem_chosen_p;         // (P), routers with a p of their own
  float const* gmem_logits;           // (T,E), routers with a softmax over all
  float const* gmem_aux_dlogits;      // (T,E), rows aux_pitch elements apart, or null
  int64_t aux_pitch;                  //
  float* gmem_dlogits;                // (T,E), every element is written
  void* gmem_rounded;                 // the same as bf16: the operand of dgrad and wgrad; or null
  float* gmem_copy;                   // the same, rows copy_pitch elements apart, or null
  int64_t copy_pitch;                 //
  int64_t tokens;                     // T
  int32_t experts;                    // E
  int32_t top_k;                      // K; not read with token_offsets
  RouterKind kind;                    // any but given
  float route_scale;
  bool normalize_scores;
};

/// dlogits that an earlier call left, as the 16-bit operand of wgrad: one rounding each.
struct RoundDlogitsArguments {
  float const* gmem_dlogits;  // `count` elements
  void* gmem_rounded;         // bf16
  int64_t count;              // T*E
};

/// The GEMMs of the router's backward run as those of the experts: rows are tokens. Where tokens are summed over, they
/// come in `count` segments of `each`, the last one shorter, so that few outputs keep a GPU busy. From the shape alone.
struct TokenSegments {
  int64_t count;  // >= 1
  int64_t each;
};
constexpr TokenSegments token_segments(int64_t tokens, int64_t hidden, int64_t experts) {
  constexpr int64_t kTiles = 132, kTileRows = 128, kTileColumns = 256, kLeastTokens = 512;
  int64_t const tiles =
      (experts + kTileRows - 1) / kTileRows * ((hidden + kTileColumns - 1) / kTileColumns);
  int64_t const wanted = (kTiles + tiles - 1) / tiles, most = tokens / kLeastTokens;
  int64_t const count = most < 1 ? 1 : wanted < most ? wanted : most;
  int64_t const each = (tokens + count - 1) / count;
  return {each == 0 ? 1 : (tokens + each - 1) / each, each};
}
struct TokenOffsetsArguments {
  TokenSegments segments;
  int64_t tokens;         // T
  int32_t* gmem_all;      // (2): 0, T
  int32_t* gmem_offsets;  // (count+1): where segments start, and T
};

/// dx_t = rnd(dl_t w_router), for rows of dx that are not contiguous.
struct RouterDgradArguments {
  void const* gmem_dlogits;  // (T,E) bf16
  MatrixRows w_router;       // (E,d)
  void* gmem_dx;             // (T,d) bf16, every element is written
  int64_t dx_pitch;          // elements from one row of dx to the next
  int64_t tokens, hidden;    // T, d
  int32_t experts;           // E
};

/// dw_router[e,c] = sum of the segments' partials, in order.
struct RouterWgradArguments {
  float const* gmem_partials;  // (segments,E,d)
  int64_t segments;            //
  void* gmem_dw_router;        // (E,d)
  int64_t dw_pitch;            // elements from one row of dw_router to the next
  bool is_fp32;                // of dw_router, else bf16
  bool accumulates;            // adds the complete fp32 sum once, else overwrites
  int64_t tokens, hidden;      // T, d; without tokens nothing is added
  int32_t experts;             // E
};

/// Launch on `stream`; allocate nothing, wait for nothing. dscores: a thread per slot, with a bias a warp.
/// merge_repeats and router_dlogits: a warp per token. The others: one thread per output, fp32 sums in order.
cudaError_t launch_dscores_plain(DscoresArguments const& args, cudaStream_t stream);
cudaError_t launch_merge_repeats_plain(MergeRepeatsArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dlogits_plain(RouterDlogitsArguments const& args, cudaStream_t stream);
cudaError_t launch_round_dlogits_plain(RoundDlogitsArguments const& args, cudaStream_t stream);
cudaError_t launch_token_offsets_plain(TokenOffsetsArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dgrad_plain(RouterDgradArguments const& args, cudaStream_t stream);
cudaError_t launch_router_wgrad_plain(RouterWgradArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
