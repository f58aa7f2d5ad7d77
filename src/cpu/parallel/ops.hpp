// SPDX-License-Identifier: Apache-2.0
// The CPU backend's ops, one .cpp each. All of them: fp32 sums in a fixed order, no allocation. T is the storage type,
// float or Bf16, G that of weight gradients, T or float; each .cpp instantiates all.
#pragma once

#include <cstdint>

#include "core/token_rounding.hpp"
#include "cpu/parallel/layer.hpp"

namespace tessera::cpu {

// --- routing -----------------------------------------------------------------------------------

/// logits[t,e] = x_t . w_router[e] (+ b_router[e]). W: what the router is stored in, T or float.
template <class W>
struct RouterWeights {
  Rows<W const> w_router;       ///< [E,d]
  W const* b_router = nullptr;  ///< [E] or null
};
template <class T, class W>
void router_logits(MoeDesc const& desc, Rows<T const> x, RouterWeights<W> const& router,
                   MutableRows logits, Threads const& threads) noexcept;
std::int64_t router_logits_scratch(MoeDesc const& desc) noexcept;

/// The top-k choice of each token from its logits: ids [T,K] (int32 or int64), and either weights [T,K] and p of the
/// chosen [P] for routers that save it, or, where experts then take tokens (token rounding, expert choice), the rank
/// of every pair. Expert choice has no ids. Needs select_scratch_floats of scratch per thread, 8-byte aligned.
struct Selection {
  void* ids = nullptr;
  DType ids_dtype = DType::int32;
  std::int64_t ids_pitch = 0;
  MutableRows weights = {};
  float* chosen_p = nullptr;
  std::uint32_t* ranks = nullptr;  ///< [E,T] core::pair_rank
  /// [T] or null, read: tokens of 0 get ids -1, weights 0 and no rank.
  std::uint8_t const* token_mask = nullptr;
};
void select_experts(MoeDesc const& desc, ConstRows logits, float const* selection_bias,
                    Selection const& out, Threads const& threads) noexcept;
std::int64_t select_scratch_floats(MoeDesc const& desc) noexcept;

/// Replay: scores (and chosen_p) of the ids in routing.topk_ids, negative ones being sentinels. A router's formulas
/// hold for the set of experts that a token names. Scratch as select_experts.
void score_choice(MoeDesc const& desc, ConstRows logits, RoutingView const& routing,
                  Threads const& threads) noexcept;

/// Token rounding and expert choice: every expert keeps the pairs of highest rank. Fills topk_ids (-1 behind the last
/// token's slots), scores and token_offsets of the tables. `pairs` has space for E; needs choose_tokens_scratch floats
/// per thread, 8-byte aligned.
void choose_tokens(MoeDesc const& desc, std::uint32_t* ranks, core::ExpertPairs* pairs,
                   RoutingView const& routing, Threads const& threads) noexcept;
std::int64_t choose_tokens_scratch(MoeDesc const& desc) noexcept;

/// The routing tables from slot ids. `chunk_counts` holds metadata_chunks(P) * E int32.
struct SlotIds {
  void const* data = nullptr;
  DType dtype = DType::int32;
  std::int64_t pitch = 0;  ///< elements between tokens; K slots per token unless experts vary
};
void metadata(MoeDesc const& desc, SlotIds const& ids, RoutingView const& routing,
              std::int32_t* chunk_counts, Threads const& threads) noexcept;
std::int64_t metadata_chunks(std::int64_t slots) noexcept;

/// The tables of rows that were grouped ahead of the call: routing.expert_offsets is filled in, every
/// permutation is the identity, rows from R on have none.
void grouped_metadata(MoeDesc const& desc, RoutingView const& routing) noexcept;

// --- forward -----------------------------------------------------------------------------------

/// h_r = x_t w_up[e]^T + b_up[e], a_r = act(h_r). Either may be null: not kept (inference), not computed
/// (a backward that recomputes h, with the bits of forward).
template <class T>
void up_projection_fwd(Layer<T> const& layer, Rows<T const> x, T* h, T* a,
                       Threads const& threads) noexcept;
std::int64_t up_projection_fwd_scratch(MoeDesc const& desc) noexcept;

/// y_r = a_r w_down[e]^T + b_down[e], some columns: y is [P,columns.count].
template <class T>
void down_projection_fwd(Layer<T> const& layer, T const* a, Columns columns, T* y,
                         Threads const& threads) noexcept;
std::int64_t down_projection_fwd_scratch(MoeDesc const& desc) noexcept;

/// out_t = (initial_t) + sum over slots j of t, ascending, of s_j * rows[inverse_permutation[j]];
/// unweighted where scores is null; 0 without rows and initial values.
template <class T>
struct AggregateArgs {
  T const* rows = nullptr;        ///< [P,columns.count]
  Columns columns;                ///< of out
  float const* scores = nullptr;  ///< [P] by slot, or null: all 1
  bool add_to_out = false;        ///< start from what out holds
  Rows<T> out;                    ///< [T,d]
};
template <class T>
void aggregate(Layer<T> const& layer, AggregateArgs<T> const& args,
               Threads const& threads) noexcept;

// --- backward ----------------------------------------------------------------------------------

/// dA' = dO_t w_down[e]; ds = <dA', A> + <dO_t, b_down[e]>; dh = J_act^T (s dA'); a_scaled = s A.
template <class T>
struct DownDgradArgs {
  Rows<T const> d_o;         ///< [T,d]
  T const* h = nullptr;      ///< [P,w*n]
  T* dh = nullptr;           ///< [P,w*n]
  T* a_scaled = nullptr;     ///< [P,n]
  float* dscores = nullptr;  ///< [P] by slot, 0 at sentinels; or null
};
template <class T>
void down_projection_dgrad(Layer<T> const& layer, DownDgradArgs<T> const& args,
                           Threads const& threads) noexcept;
std::int64_t down_projection_dgrad_scratch(MoeDesc const& desc) noexcept;

/// dw_down[e] = sum_r dO_t^T a_scaled_r, db_down[e] = sum_r s_j dO_t.
template <class T, class G>
struct DownWgradArgs {
  Rows<T const> d_o;
  T const* a_scaled = nullptr;
  DownMatrices<G> dw_down;  ///< null data: skipped
  DownBiases<G> db_down;    ///< null data: skipped
  GradientMode mode = GradientMode::write;
};
template <class T, class G>
void down_projection_wgrad(Layer<T> const& layer, DownWgradArgs<T, G> const& args,
                           Threads const& threads) noexcept;

/// dx_rows_r = dh_r w_up[e], some columns: dx_rows is [P,columns.count].
template <class T>
void up_projection_dgrad(Layer<T> const& layer, T const* dh, Columns columns, T* dx_rows,
                         Threads const& threads) noexcept;
std::int64_t up_projection_dgrad_scratch(MoeDesc const& desc) noexcept;

/// dw_up[e] = sum_r dh_r^T x_t, db_up[e] = sum_r dh_r.
template <class T, class G>
struct UpWgradArgs {
  Rows<T const> x;
  T const* dh = nullptr;
  UpMatrices<G> dw_up;  ///< null data: skipped (gate and up each where separate)
  UpBiases<G> db_up;    ///< null data: skipped
  GradientMode mode = GradientMode::write;
};
template <class T, class G>
void up_projection_wgrad(Layer<T> const& layer, UpWgradArgs<T, G> const& args,
                         Threads const& threads) noexcept;

/// Scratch of both weight gradients.
std::int64_t wgrad_scratch(MoeDesc const& desc) noexcept;

/// dlogits[t,e] from dscores [P] by slot and what forward saved in the routing tables, plus `initial` [T,E] (null
/// data: 0). Needs router_dlogits_scratch floats per thread.
struct RouterDlogitsArgs {
  float const* dscores = nullptr;
  ConstRows initial = {};
  MutableRows dlogits = {};
  std::uint8_t const* token_mask = nullptr;  ///< [T] or null; zeros for tokens of 0
};
void router_dlogits(MoeDesc const& desc, RoutingView const& routing, RouterDlogitsArgs const& args,
                    Threads const& threads) noexcept;
std::int64_t router_dlogits_scratch(MoeDesc const& desc) noexcept;

/// dx_t = dlogits_t w_router. W as for router_logits.
template <class T, class W>
void router_dgrad(MoeDesc const& desc, ConstRows dlogits, Rows<W const> w_router, Rows<T> dx,
                  Threads const& threads) noexcept;
std::int64_t router_dgrad_scratch(MoeDesc const& desc) noexcept;

/// dw_router = dlogits^T x, db_router = sum_t dlogits_t. Null data: skipped.
template <class T, class G>
struct RouterWgradArgs {
  ConstRows dlogits;
  Rows<T const> x;
  Rows<G> dw_router;
  G* db_router = nullptr;
  GradientMode mode = GradientMode::write;
  std::uint8_t const* token_mask = nullptr;  ///< [T] or null; rows of tokens of 0 are not read
};
template <class T, class G>
void router_wgrad(MoeDesc const& desc, RouterWgradArgs<T, G> const& args,
                  Threads const& threads) noexcept;
std::int64_t router_wgrad_scratch(MoeDesc const& desc) noexcept;

}  // namespace tessera::cpu
