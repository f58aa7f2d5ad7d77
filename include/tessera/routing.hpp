// SPDX-License-Identifier: Apache-2.0
// Routing tables: which row of which expert serves which slot (token, choice).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera {

/// Typed pointers into a routing buffer: 4-byte elements, packed in this order. Up to three elements ahead of logits,
/// which begin at a multiple of 16 bytes from the buffer's begin, belong to no table; moe_forward writes 0 there.
/// Slot j of token t is t*K + k, or the place in the (token, expert) list where experts per token vary.
/// Rows are sorted by expert and, inside an expert, by slot. With token rounding fewer than P slots may be in use:
/// those from token_offsets[T] = R on belong to no token (id -1, score 0).
struct RoutingView {
  std::int32_t* expert_offsets = nullptr;       ///< [E+1] exclusive prefix sum of M_e; last = R
  std::int32_t* sort_permutation = nullptr;     ///< [P] row -> slot; -1 from row R on
  std::int32_t* gather_index = nullptr;         ///< [P] row -> token; 0 from row R on
  std::int32_t* inverse_permutation = nullptr;  ///< [P] slot -> row; -1 exactly at sentinels
  float* scores = nullptr;                      ///< [P] by slot
  std::int32_t* token_offsets = nullptr;        ///< [T+1], null unless MoeDesc::experts_vary()
  std::int32_t* topk_ids = nullptr;             ///< [P] by slot, null with RouterKind::given
  float* chosen_p =
      nullptr;  ///< [P] by slot, no rounding: p of sigmoid_bias, group_limited and sqrtsoftplus
  float* logits = nullptr;  ///< [T,E] of softmax_topk, expert_choice, and with token rounding
  std::int32_t* unrounded_ids = nullptr;  ///< [T,K] the top-k choice, with token rounding
};

/// Bytes of the routing buffer: 16P + 4(E+1) [+ 4(T+1) if experts per token vary] [+ 4P for the ids of a router]
/// [up to a multiple of 16, + 4TE with softmax_topk, expert_choice, token rounding; else + 4P with sigmoid_bias,
/// group_limited, sqrtsoftplus]
/// [+ 4TK with token rounding].
TESSERA_EXPORT Expected<std::size_t> routing_bytes(MoeDesc const& desc) noexcept;

/// Pointers into `routing`, which must hold routing_bytes(desc) and be 4-byte aligned.
TESSERA_EXPORT Expected<RoutingView> routing_view(MoeDesc const& desc, Buffer routing) noexcept;

/// Rows that the caller sorted by expert: RowGrouping other than slots.
struct GroupedRoutingArgs {
  ConstTensor expert_offsets = {};  ///< [E+1] offsets, or [E] ends or counts, as in MoeForwardArgs
  ConstTensor row_scores = {};      ///< optional [P] fp32: 1 without
  Buffer routing = {};              ///< routing_bytes(desc); may not overlap what is read
};

/// Writes the tables that moe_forward would leave of such rows, without running a layer. A backward pass needs them of
/// rows whose forward pass ran elsewhere or without their scores, such as those of experts over several GPUs
/// (expert_parallel.hpp). Errors as in moe_forward; on cuda check_device_values() reports offsets that break a rule.
TESSERA_EXPORT Status routing_of_groups(Context const& context, MoeDesc const& desc,
                                        GroupedRoutingArgs const& args,
                                        Stream stream = {}) noexcept;

/// Inputs and outputs of the router alone, for callers that place it apart from the layer (activation
/// checkpointing that must route alike, expert parallelism). Where experts per token vary (token rounding, expert
/// choice), ids and weights are [P] by token and expert, and those from token_offsets[T] on are -1 and 0.
struct RouteArgs {
  ConstTensor x = {};               ///< [T,d]
  ConstTensor w_router = {};        ///< [E,d], of MoeDesc::router_storage()
  ConstTensor b_router = {};        ///< [E], optional, as w_router
  ConstTensor selection_bias = {};  ///< [E] fp32, optional
  Tensor topk_ids = {};       ///< [T,K] int32 or int64, by descending key, then by ascending id
  Tensor topk_weights = {};   ///< [T,K] fp32
  Tensor token_offsets = {};  ///< [T+1] as topk_ids, where experts per token vary, else absent
  Tensor logits = {};         ///< optional [T,E] fp32
  Buffer workspace = {};      ///< workspace_bytes(context, desc, Pass::route)
  ConstTensor token_mask =
      {};  ///< optional [T] uint8: tokens of 0 are padding and get ids -1, weights 0 (MoeForwardArgs)
};

/// Logits, selection and scores of `desc.router`: what moe_forward would use, bit for bit.
TESSERA_EXPORT Status route(Context const& context, MoeDesc const& desc, RouteArgs const& args,
                            Stream stream = {}) noexcept;

}  // namespace tessera
