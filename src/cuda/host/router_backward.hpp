// SPDX-License-Identifier: Apache-2.0
// From the partial sums of ds to the gradients of the router: dscores, dlogits, dx = dl w_router, dw_router = dl^T x.
// Host side: the calls' arguments, which are the kernels' parameters too, and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "projection.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

/// A lane of a warp adds up so many of every 32 * kBiasVector columns of <dO, b_down>, one after the other.
constexpr int kBiasVector = 8;

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
  bool dlogits_are_scratch;           // nobody reads gmem_dlogits: the fast kernel leaves it alone
  void* gmem_rounded;                 // the same as bf16: the operand of dgrad and wgrad; or null
  float* gmem_row_dlogits = nullptr;  // (P) by row, 0 where the slot has no id; or null
  int32_t const* gmem_inverse_permutation = nullptr;  // (P), read with row_dlogits
  float* gmem_copy;    // the same, rows copy_pitch elements apart, or null
  int64_t copy_pitch;  //
  int64_t tokens;      // T
  int32_t experts;     // E
  int32_t top_k;       // K; not read with token_offsets
  RouterKind kind;     // any but given
  float route_scale;
  bool normalize_scores;
  uint8_t const* gmem_token_mask = nullptr;  // (T) or null: aux of tokens of 0 is not read
};

/// The same after token rounding, of routers without a softmax over all: the gradient also reaches experts of the top-k
/// choice that were dropped, and experts that were added have scores of their own. The plain kernel serves no
/// row_dlogits.
struct RoundedDlogitsArguments {
  RouterDlogitsArguments dlogits;     // of the slots that are left, with logits and token_offsets
  int32_t const* gmem_unrounded_ids;  // (T,K) the top-k choice
  float* gmem_member_scores;          // (T,K) scratch
  float* gmem_member_dscores;         // (T,K) scratch
  int32_t* gmem_added_ids;            // (P) scratch
};

/// Both, from the partial sums to dlogits; `dlogits` reads the dscores that `dscores` makes.
struct RouterGradientArguments {
  DscoresArguments dscores;
  RouterDlogitsArguments dlogits;
  bool starts_early = false;  // while the previous kernel of the stream ends
};

/// dlogits that an earlier call left, as the 16-bit operand of wgrad: one rounding each.
struct RoundDlogitsArguments {
  float const* gmem_dlogits;  // `count` elements
  void* gmem_rounded;         // bf16
  int64_t count;              // T*E
};

/// dx_t = rnd(dl_t w_router), of all tokens or of those that are listed.
struct RouterDgradArguments {
  void const* gmem_dlogits;    // (T,E,terms) bf16
  MatrixRows w_router;         // (E,terms,d) as rows
  void* gmem_dx;               // (T,d) bf16, every element of these tokens is written
  int64_t dx_pitch;            // elements from one row of dx to the next
  int64_t tokens, hidden;      // T, d
  int32_t experts;             // E
  int32_t* gmem_tile_counter;  // one int, 0 before and after every launch
  int32_t terms = 1;  // of the product of a dlogit and a row of w_router (host/split_fp32.hpp)
  int32_t const* gmem_tokens = nullptr;   // (T) the tokens, each once; null: all
  int32_t const* gmem_offsets = nullptr;  // {0, how many of gmem_tokens}, read with it
  bool starts_early = false;  // while the previous kernel of the stream ends; with gmem_tokens
};

/// dw_router[e,c] = sum over tokens t, ascending, of dl[t,e] * x[t,c]; first inside chunks of tokens, then over the
/// chunks in order.
struct RouterWgradArguments {
  void const* gmem_dlogits;    // (T,terms,E) bf16: dl is their sum
  MatrixRows x;                // (T,d)
  void* gmem_dw_router;        // (E,d)
  int64_t dw_pitch;            // elements from one row of dw_router to the next
  bool is_fp32;                // of dw_router, else bf16
  bool accumulates;            // adds the complete fp32 sum once, else overwrites (zeros for T = 0)
  float* gmem_partials;        // router_wgrad_partials(T, d, terms * E)
  uint32_t* gmem_arrived;      // one word, 0 before and after every launch
  int64_t hidden;              // d
  int32_t experts;             // E
  int32_t* gmem_tile_counter;  // one int, 0 before and after every launch
  bool starts_early = false;   // while the previous kernel of the stream ends
  int32_t terms = 1;
  /// With padding: row i of dlogits is that of token gmem_order[i], and the chunks, as many as
  /// router_wgrad_most_chunks(), end where real tokens do. Null: all tokens are real.
  int32_t const* gmem_order = nullptr;          // (T)
  int32_t const* gmem_chunk_offsets = nullptr;  // (chunks + 1)
};

/// Columns of a tile: with many experts the tensor cores are the bound, and wide tiles load less for each product.
__host__ __device__ constexpr int router_wgrad_tile_experts(int64_t experts) {
  return experts >= 256 ? 256 : 128;
}

constexpr int64_t kRouterWgradChunk = 512;  // tokens, at least

/// As many chunks as make about 132 tiles of 128 columns of x in all.
__host__ __device__ constexpr int64_t router_wgrad_wanted_chunks(int64_t hidden, int64_t experts) {
  int64_t const width = router_wgrad_tile_experts(experts);
  int64_t const tiles = (hidden + 127) / 128 * ((experts + width - 1) / width);
  return tiles < 132 ? 132 / tiles : 1;
}
/// Tokens of a chunk.
__host__ __device__ constexpr int64_t router_wgrad_chunk(int64_t tokens, int64_t hidden,
                                                         int64_t experts) {
  int64_t const chunks = router_wgrad_wanted_chunks(hidden, experts);
  int64_t const rows = (tokens + chunks - 1) / chunks;
  return rows < kRouterWgradChunk ? kRouterWgradChunk : (rows + 63) / 64 * 64;
}
constexpr int64_t router_wgrad_chunks(int64_t tokens, int64_t hidden, int64_t experts) {
  int64_t const rows = router_wgrad_chunk(tokens, hidden, experts);
  return tokens > rows ? (tokens + rows - 1) / rows : 1;
}
/// No number of real tokens up to `tokens` has more chunks.
__host__ __device__ constexpr int64_t router_wgrad_most_chunks(int64_t tokens, int64_t hidden,
                                                               int64_t experts) {
  int64_t const wanted = router_wgrad_wanted_chunks(hidden, experts);
  int64_t const possible = (tokens + kRouterWgradChunk - 1) / kRouterWgradChunk;
  return possible < 1 ? 1 : possible < wanted ? possible : wanted;
}
/// Elements of the chunks' sums, of whole tiles of columns of x.
constexpr int64_t router_wgrad_partials(int64_t tokens, int64_t hidden, int64_t experts) {
  return router_wgrad_most_chunks(tokens, hidden, experts) * experts * ((hidden + 127) / 128 * 128);
}

/// The fast kernels, for calls that refuse() of layer/select.hpp lets pass: launch on `stream`; allocate nothing, wait
/// for nothing.
cudaError_t launch_router_dlogits(RouterGradientArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dgrad(RouterDgradArguments const& args, int sm_count,
                                cudaStream_t stream);
cudaError_t launch_router_wgrad(RouterWgradArguments const& args, int sm_count,
                                cudaStream_t stream);

/// Launch on `stream`; allocate nothing, wait for nothing. dscores: a thread per slot, with a bias a warp.
/// merge_repeats, router_dlogits and .._rounded: a warp per token. The others: one thread per output, fp32 sums in
/// order.
cudaError_t launch_dscores_plain(DscoresArguments const& args, cudaStream_t stream);
cudaError_t launch_merge_repeats_plain(MergeRepeatsArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dlogits_plain(RouterDlogitsArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dlogits_rounded_plain(RoundedDlogitsArguments const& args,
                                                cudaStream_t stream);
cudaError_t launch_round_dlogits_plain(RoundDlogitsArguments const& args, cudaStream_t stream);
cudaError_t launch_router_dgrad_plain(RouterDgradArguments const& args, cudaStream_t stream);
cudaError_t launch_router_wgrad_plain(RouterWgradArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
