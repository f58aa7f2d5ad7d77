// SPDX-License-Identifier: Apache-2.0
// The workspace of each pass. The query and the call build the same plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/workspace.hpp"
#include "tessera/moe.hpp"

namespace tessera::cuda {

/// Counters of the persistent kernels and words between them, one int each, 0 before the first of these kernels:
/// cleared by the kernel that makes the tables (host/cleared_words.hpp), in backward at the start.
enum TileCounter : int {
  kUpProjectionCounter,
  kDownProjectionCounter,
  kDownProjectionDgradCounter,
  kUpProjectionDgradCounter,
  kDownProjectionWgradCounter,
  kUpProjectionWgradCounter,
  kRouterDgradCounter,
  kRouterWgradCounter,
  kAggregateCounter,
  kForwardHandover,   // of up_projection_fwd to down_projection_fwd
  kBackwardHandover,  // of down_projection_dgrad to down_projection_wgrad
  kRouterWgradParts,  // that router_wgrad has counted
  kListedTokens,      // by router_dlogits_rounded: a word of 64 bits
  kListedTokensHigh,  // its upper half
  kListedFirst,       // 0, and
  kListedEnd,         // how many tokens it has listed
  kNumTileCounters
};
static_assert(kListedTokens % 2 == 0);

/// Most columns of y or dx rows that exist at a time. At least 8 of them are a multiple of 8, so that the rows of every
/// chunk are of 16 bytes each where those of all columns are.
std::int64_t column_chunk(MoeDesc const& desc) noexcept;

/// Columns of d; y and dx rows hold these alone.
struct Columns {
  std::int64_t first = 0, count = 0;
};
/// body(columns, is_last) for every chunk, first to last.
template <class Body>
void for_each_column_chunk(MoeDesc const& desc, Body&& body) noexcept {
  std::int64_t const d = desc.shape.hidden, chunk = column_chunk(desc);
  for (std::int64_t first = 0; first < d; first += chunk) {
    body(Columns{first, std::min(chunk, d - first)}, first + chunk >= d);
  }
}

/// True where choose_tokens chooses the slots, and in forward makes their tables in the place of metadata.
bool chooses_tokens(MoeDesc const& desc) noexcept;

/// True where calls may take experts_fwd_few_tokens, whose rows of a and y lie behind the counters and are cleared with
/// them.
bool has_few_tokens(MoeDesc const& desc) noexcept;

/// Regions of token rounding and expert choice.
struct ChoicePlan {
  core::Region<float> member_scores;  ///< [T,K], token rounding
  core::Region<std::byte> workspace;  ///< choose_tokens_workspace_bytes
};

/// Codes of e4m3 and their scales, fp32 or e8m0 as the precision has them.
struct CodesRegion {
  core::Region<std::uint8_t> codes;
  core::Region<std::byte> scales;
};

struct ForwardPlan {
  core::Region<std::byte> routing;      ///< the tables, SavePolicy::none; always the first region
  core::Region<std::int32_t> counters;  ///< [kNumTileCounters]
  std::int64_t cleared_words = 0;       ///< from the counters on; with few tokens to the end of y
  core::Region<float> logits;           ///< [T,E], with a router whose tables do not have them
  core::Region<std::uint16_t>
      router_terms;                ///< [E,router_terms_pitch(d)] bf16, with an fp32 router
  core::Region<std::int32_t> ids;  ///< [P], RouterKind::given
  core::Region<std::byte>
      metadata;  ///< metadata_workspace_bytes, unless choose_tokens makes the tables
  ChoicePlan choice;
  core::Region<std::uint16_t> a,
      y;  ///< [P,n], [P,column_chunk] bf16; y in the place of logits, terms, ids and choice, given ids' metadata,
          ///< unless tokens are few
  // These are of a layer that quantises, in place of a: x8 with SavePolicy::none, it and w_up in the place of y.
  CodesRegion x8;            ///< [T,d]
  CodesRegion w_up, w_down;  ///< [E,w,n,d], [E,d,n]
  CodesRegion a8;            ///< [P,n]
  std::size_t bytes = 0;
};
ForwardPlan plan_forward(MoeDesc const& desc, std::size_t routing_bytes) noexcept;

struct BackwardPlan {
  core::Region<std::int32_t> counters;  ///< [kNumTileCounters]
  core::Region<std::uint16_t>
      dh;  ///< [P,w*n] bf16, in the place of h recomputed; absent: the caller's, or h
  core::Region<std::uint16_t>
      a_or_dx;  ///< a_scaled [P,n], then dx rows [P,column_chunk]: never alive at once; bf16
  core::Region<float> ds_partials;      ///< [P,score_groups(n)]
  core::Region<float> dscores;          ///< [P], with a router
  core::Region<float> row_dlogits;      ///< [P] by row, with a router
  core::Region<float> dlogits;          ///< [T,E], with a router; split: the caller's
  core::Region<std::uint16_t> rounded;  ///< dlogits [T,E] bf16, with a router
  // With an fp32 router, in place of them, bf16 (host/split_fp32.hpp):
  core::Region<std::uint16_t> wgrad_dlogits;  ///< [T,2,E]
  core::Region<std::uint16_t> dgrad_dlogits;  ///< [T,E,3]
  core::Region<std::uint16_t> dgrad_router;   ///< [E,3,d]
  core::Region<float> router_partials;        ///< router_wgrad_partials of dw_router, with a router
  core::Region<std::int32_t> merged_ids;      ///< [P], with replay
  core::Region<float> merged_dscores;         ///< [P], with replay
  core::Region<float> member_scores,
      member_dscores;                    ///< [T,K], token rounding without softmax_topk
  core::Region<std::int32_t> added_ids;  ///< [P], the same
  core::Region<std::int32_t> listed;     ///< [T] ListedTokens, in the place of member_scores
  core::Region<std::uint8_t> is_listed;  ///< [T] the same, in the place of member_dscores
  core::Region<std::byte> packed;        ///< PackedPlan; whole: in the place of dx rows, then dead
  // These are of a layer that quantises.
  core::Region<std::uint16_t> x;  ///< x^ [T,d] bf16, of passes with gradients of weights
  CodesRegion w_up;            ///< [E,w,n,d], SavePolicy::x; dead when down_projection_dgrad begins
  CodesRegion h8;              ///< [P,w*n], SavePolicy::x
  CodesRegion dh8;             ///< [P,w*n]; in the place of h8; absent: it lies over the caller's h
  CodesRegion d_o8, w_down_t;  ///< [T,d], [E,n,d]
  CodesRegion w_up_t;          ///< [E,d,w*n], in the place of d_o8 and w_down_t
  std::size_t bytes = 0;
};
/// Regions of dw_router and db_router with padding.
struct PackedPlan {
  core::Region<std::uint16_t> dlogits;       ///< [T,E] bf16
  core::Region<std::int32_t> order;          ///< [T]
  core::Region<std::int32_t> rows;           ///< {0, real tokens}
  core::Region<std::int32_t> chunk_offsets;  ///< [router_wgrad_most_chunks + 1]
  std::size_t bytes = 0;
};
PackedPlan plan_packed(MoeDesc const& desc) noexcept;
/// True where backward distinguishes the top-k choice from what token rounding added: with a softmax over all it need
/// not.
bool splits_rounded(MoeDesc const& desc) noexcept;
/// pass: backward, backward_input or backward_weights.
BackwardPlan plan_backward(MoeDesc const& desc, Pass pass) noexcept;

struct GroupedGemmPlan {
  core::Region<std::int32_t> counters;        ///< [kNumTileCounters]
  core::Region<std::int32_t> expert_offsets;  ///< [E+1], checked
  std::size_t bytes = 0;
};
GroupedGemmPlan plan_grouped_gemm(std::int64_t experts) noexcept;

struct RoutePlan {
  core::Region<float> logits;                ///< [T,E]
  core::Region<std::uint16_t> router_terms;  ///< as ForwardPlan's
  core::Region<std::int32_t> ids;            ///< [P]
  core::Region<float> weights;               ///< [P]
  core::Region<std::int32_t> token_offsets;  ///< [T+1], token rounding and expert choice
  core::Region<std::int32_t> unrounded_ids;  ///< [T,K], token rounding
  ChoicePlan choice;
  std::size_t bytes = 0;
};
RoutePlan plan_route(MoeDesc const& desc) noexcept;

struct RouterLossPlan {
  core::Region<float> cost;                ///< [E+1]
  core::Region<float> partials;            ///< [3,loss_blocks(T)]
  core::Region<std::int32_t> count;        ///< real tokens
  core::Region<std::int32_t> order;        ///< [T], real tokens first
  core::Region<std::int32_t> counts;       ///< [B,E+1], with sequences
  core::Region<std::int32_t> sequence_of;  ///< [T], the same
  core::Region<float> sequence_cost;       ///< [B,E], the same
  std::size_t bytes = 0;
};
RouterLossPlan plan_router_loss(MoeDesc const& desc, std::int64_t sequences) noexcept;

}  // namespace tessera::cuda
