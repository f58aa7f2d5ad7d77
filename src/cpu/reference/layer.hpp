// SPDX-License-Identifier: Apache-2.0
// The oracle: one MoE layer in fp64, nothing rounded, plain loops that read like the equations.
//
// Letters as in docs/glossary.md: T tokens, d hidden, n intermediate, E experts, P slots, R rows.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/reference/layout.hpp"
#include "cpu/reference/metadata.hpp"
#include "cpu/reference/token_rounding.hpp"
#include "tessera/moe.hpp"

namespace tessera::reference {

using Values = std::vector<double>;

/// Holds what a layer reads. Weights stand in the layout of desc.layout.
struct Inputs {
  MoeDesc desc;
  Values x;                                 ///< [T,d]
  std::vector<std::int64_t> topk_ids;       ///< [P] by slot: given, or a router's choice to replay
  std::vector<std::int64_t> token_offsets;  ///< [T+1] where experts per token vary
  std::vector<std::int64_t> unrounded_ids;  ///< [T,K] the top-k choice before token rounding
  Values scores;                            ///< [P] by slot, RouterKind::given
  Values w_router;                          ///< [E,d], any other router
  Values b_router;                          ///< [E] or empty
  Values selection_bias;                    ///< [E] or empty: added to the keys
  Values aux_dlogits;                       ///< [T,E] or empty: added to dlogits
  StoredWeights weights;
};

/// Holds what forward computes, intermediate values included. Rows are expert-sorted.
struct Forward {
  Metadata metadata;
  Values logits;  ///< [T,E], with a router
  Values scores;  ///< [P] by slot
  LogicalWeights weights;
  Values h_gate, h_up;  ///< [R,n] each; h_gate is empty where not gated
  Values a;             ///< [R,n]
  Values y;             ///< [R,d]
  Values o;             ///< [T,d]
};

/// Holds what backward computes.
struct Backward {
  Values dh_gate, dh_up;  ///< [R,n]
  Values a_scaled;        ///< [R,n]: s*a
  Values dx_rows;         ///< [R,d]
  Values dx;              ///< [T,d]
  Values dscores;         ///< [P] by slot
  Values dlogits;         ///< [T,E], with a router
  Values dw_router, db_router;
  StoredWeights gradients;
};

Forward forward(Inputs const& inputs);
Backward backward(Inputs const& inputs, Forward const& forward, Values const& d_o);

/// Returns what forward() begins with: the tables, logits and scores, and the weights in one layout.
Forward begin_forward(Inputs const& inputs);

// The ops, one .cpp each.
void up_projection_fwd(Inputs const& inputs, Forward& f);
void down_projection_fwd(Inputs const& inputs, Forward& f);
/// out_t += sum over slots j of t, ascending, of weights_j * rows[inverse_permutation[j]] (1 where absent).
void aggregate(MoeDesc const& desc, Metadata const& metadata, Values const& rows,
               Values const* weights, Values& out);
void down_projection_dgrad(Inputs const& inputs, Forward const& f, Values const& d_o, Backward& b);
void down_projection_wgrad(Inputs const& inputs, Forward const& f, Values const& d_o, Backward& b,
                           LogicalWeights& gradients);
void up_projection_dgrad(Inputs const& inputs, Forward const& f, Backward& b);
void up_projection_wgrad(Inputs const& inputs, Forward const& f, Backward const& b,
                         LogicalWeights& gradients);

// The router (route.cpp).
Values router_logits(Inputs const& inputs);
/// Returns what the experts of a token are chosen by: [T,E].
Values router_keys(Inputs const& inputs, Values const& logits);
/// group_limited: the sum of the two largest keys of each group of one token.
Values group_sums(MoeDesc const& desc, double const* keys);
/// [T,E]: whether the token keeps the expert's group; all 1 without groups.
std::vector<char> eligible_pairs(MoeDesc const& desc, Values const& keys);
/// The top-k choice, [T,K].
std::vector<std::int64_t> select_experts(MoeDesc const& desc, Values const& keys);
/// [E]: the score with c = 1 that each expert has in one token's choice `members`, or would have as an addition to it.
Values unscaled_scores(MoeDesc const& desc, double const* logits,
                       std::vector<std::int64_t> const& members);
/// Returns the experts whose softmax or sum the scores of a token are parts of: its top-k choice, or the experts that
/// its slots name.
std::vector<std::int64_t> members_of(Inputs const& inputs, Metadata const& metadata,
                                     std::int64_t token);
/// Returns what experts rank their tokens by, from logits [T,E].
PairScores pair_scores(Inputs const& inputs, Values const& logits);
Values router_scores(Inputs const& inputs, Metadata const& metadata, Values const& logits);
/// dlogits from dscores; then dw_router, db_router and the router's part of dx.
void router_backward(Inputs const& inputs, Forward const& f, Backward& b);

/// sum of a[i]*b[i]. Eight partial sums, so that the loop runs at vector speed.
inline double dot(double const* a, double const* b, std::int64_t count) {
  double partial[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) partial[lane] += a[i + lane] * b[i + lane];
  }
  double sum = 0;
  for (double const value : partial) sum += value;
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// out += factor * a.
inline void add_scaled(double factor, double const* a, std::int64_t count, double* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] += factor * a[i];
}

}  // namespace tessera::reference
