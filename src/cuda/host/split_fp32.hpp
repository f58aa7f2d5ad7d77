// SPDX-License-Identifier: Apache-2.0
// fp32 values as sums of bf16, so that tensor cores multiply them with bf16 as they are: v = high + middle + low,
// exactly (24 bits are three times 8); the first two alone are off by at most 2^-17 of v.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

enum class SplitTerm : int8_t { high, middle, low };
constexpr int kMaxTerms = 3;

/// out[r*row_pitch + c/block*block_pitch + t*term_pitch + c%block] = the terms[t] of from[r*from_pitch + c]; columns
/// behind the last one, up to a whole block, get zeros. Of what is not finite, all but the first term are zero.
struct SplitArguments {
  float const* gmem_from;
  int64_t from_pitch;
  void* gmem_out;  // bf16
  int64_t row_pitch, block, block_pitch, term_pitch;
  int64_t rows, columns;
  int num_terms;
  SplitTerm terms[kMaxTerms];
};
cudaError_t launch_split_fp32_plain(SplitArguments const& args, cudaStream_t stream);

/// w_router (E,d) for router_logits: (E, k_tiles, 3, 64), where a k_tile meets the three terms of its weights.
constexpr int64_t kRouterBlock = 64;
constexpr int64_t router_terms_pitch(int64_t hidden) {
  return (hidden + kRouterBlock - 1) / kRouterBlock * kRouterBlock * kMaxTerms;
}
inline SplitArguments split_for_logits(float const* gmem_w, int64_t pitch, int64_t experts,
                                       int64_t hidden, void* gmem_out) {
  return {.gmem_from = gmem_w,
          .from_pitch = pitch,
          .gmem_out = gmem_out,
          .row_pitch = router_terms_pitch(hidden),
          .block = kRouterBlock,
          .block_pitch = kMaxTerms * kRouterBlock,
          .term_pitch = kRouterBlock,
          .rows = experts,
          .columns = hidden,
          .num_terms = kMaxTerms,
          .terms = {SplitTerm::high, SplitTerm::middle, SplitTerm::low}};
}

/// dl w_router with both split in two, without the product of both middle terms: columns (T,E,3) of dl, high, high,
/// middle, times rows (E,3,d) of w_router, high, middle, high. The dx rows take the first two of each expert's rows.
constexpr int kDgradTerms = 3;
inline SplitArguments split_dlogits_for_dgrad(float const* gmem_dlogits, int64_t tokens,
                                              int64_t experts, void* gmem_out) {
  return {.gmem_from = gmem_dlogits,
          .from_pitch = experts,
          .gmem_out = gmem_out,
          .row_pitch = kDgradTerms * experts,
          .block = 1,
          .block_pitch = kDgradTerms,
          .term_pitch = 1,
          .rows = tokens,
          .columns = experts,
          .num_terms = kDgradTerms,
          .terms = {SplitTerm::high, SplitTerm::high, SplitTerm::middle}};
}
inline SplitArguments split_weights_for_dgrad(float const* gmem_w, int64_t pitch, int64_t experts,
                                              int64_t hidden, void* gmem_out) {
  return {.gmem_from = gmem_w,
          .from_pitch = pitch,
          .gmem_out = gmem_out,
          .row_pitch = kDgradTerms * hidden,
          .block = hidden,
          .block_pitch = 0,
          .term_pitch = hidden,
          .rows = experts,
          .columns = hidden,
          .num_terms = kDgradTerms,
          .terms = {SplitTerm::high, SplitTerm::middle, SplitTerm::high}};
}

/// dl for router_wgrad, whose sums it adds up: (T, 2, E).
constexpr int kWgradTerms = 2;
inline SplitArguments split_dlogits_for_wgrad(float const* gmem_dlogits, int64_t tokens,
                                              int64_t experts, void* gmem_out) {
  return {.gmem_from = gmem_dlogits,
          .from_pitch = experts,
          .gmem_out = gmem_out,
          .row_pitch = kWgradTerms * experts,
          .block = experts,
          .block_pitch = 0,
          .term_pitch = experts,
          .rows = tokens,
          .columns = experts,
          .num_terms = kWgradTerms,
          .terms = {SplitTerm::high, SplitTerm::middle}};
}

}  // namespace tessera::cuda
