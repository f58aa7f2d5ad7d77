// SPDX-License-Identifier: Apache-2.0
// The sizes and options that fix what one MoE layer computes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tessera/tensor.hpp"

namespace tessera {

/// Sizes of one layer call.
struct MoeShape {
  std::int64_t tokens = 0;        ///< T, 0 allowed
  std::int64_t hidden = 0;        ///< d
  std::int64_t intermediate = 0;  ///< n, per expert
  std::int64_t experts = 0;       ///< E
  std::int64_t top_k = 0;         ///< K, experts per token; a router needs 1 <= K <= E
  std::int64_t slots = 0;         ///< P with variable_experts, else 0
  bool variable_experts = false;  ///< given ids vary in number: the call gives `token_offsets`

  bool operator==(MoeShape const&) const = default;
};

/// Activation functions. Gated ones compute phi(gate)*up and have w = 2 up matrices; the others compute phi(h), w = 1.
/// `geglu`, `gelu` use the tanh form; Hugging Face's hidden_act="gelu" is the `-erf` one.
enum class ActivationKind : std::int32_t {
  swiglu = 0,
  geglu = 1,
  geglu_erf = 2,
  reglu = 3,
  clamped_swiglu = 4,
  relu = 5,
  relu2 = 6,
  silu = 7,
  gelu = 8,
  gelu_erf = 9,
};

/// alpha, limit and up_offset apply to clamped_swiglu only:
/// a = (min(max(u, -limit), limit) + up_offset) * gc * sigmoid(alpha * gc), gc = min(g, limit).
/// The defaults are gpt-oss's.
struct Activation {
  ActivationKind kind = ActivationKind::swiglu;
  float alpha = 1.702f;
  float limit = 7.0f;
  float up_offset = 1.0f;

  [[nodiscard]] constexpr bool gated() const noexcept {
    return kind <= ActivationKind::clamped_swiglu;
  }
  bool operator==(Activation const&) const = default;
};

/// Says which rows of w_up are gate and up row i. concat: i and n+i. up_first: n+i and i. interleaved: 2i and 2i+1.
/// blocked: 2B*(i/B) + i%B, and the row B further on.
enum class GateUpOrder : std::int32_t { concat = 0, up_first = 1, interleaved = 2, blocked = 3 };

/// rows: w_up [E,w*n,d], w_down [E,d,n]. transposed: w_up [E,d,w*n], w_down [E,n,d].
/// separate: w_gate and w_up, both [E,n,d], w_down [E,d,n].
enum class WeightOrientation : std::int32_t { rows = 0, transposed = 1, separate = 2 };

struct WeightLayout {
  GateUpOrder order = GateUpOrder::concat;
  WeightOrientation orientation = WeightOrientation::rows;
  std::int32_t block = 0;  ///< B of GateUpOrder::blocked, divides n
  bool operator==(WeightLayout const&) const = default;
};

/// Says how a router turns logits into experts and scores (formulas: docs/numerics.md).
enum class RouterKind : std::int32_t {
  given = 0,  ///< ids and weights come from the caller
  topk_softmax = 1,
  softmax_topk = 2,
  softmax_topk_renorm = 3,
  sigmoid_bias = 4,
  group_limited = 5,
  sqrtsoftplus = 6,
  expert_choice = 7,
};

/// Token rounding, with any top-k router: M_e becomes a multiple of `tile` by dropping an expert's last choices or
/// adding tokens that did not choose it (rules: docs/numerics.md). For training; evaluation uses plain top-k. With
/// less than two tiles per expert on average (T*K/E < 2*tile) it drops or adds a large part of the pairs.
enum class Rounding : std::int32_t {
  none = 0,
  nr_f = 1,  ///< to the multiple nearest to f_e, the rows of plain top-k; ties down
  sr_f = 2,  ///< up or down at random, so that the mean of M_e is f_e
  nr_s = 3,  ///< up or down at random, with odds by the scores that down would lose and up gain
  balance_f = 4,  ///< up or down, whichever keeps the running total nearest to that of top-k
  up = 5,         ///< always up
  down = 6,       ///< always down
};

struct Router {
  RouterKind kind = RouterKind::given;
  float route_scale = 1.0f;       ///< c: every score is multiplied by it
  bool normalize_scores = false;  ///< sigmoid_bias, group_limited, sqrtsoftplus
  std::int32_t groups = 0;        ///< group_limited; 0: chosen from E
  std::int32_t top_groups = 0;    ///< group_limited; 0: chosen from K
  Rounding round = Rounding::none;
  std::int32_t tile = 128;  ///< M of token rounding
  std::uint64_t seed = 0;   ///< stochastic rounding: equal (seed, step, layer) give equal choices
  std::uint64_t step = 0;
  std::uint32_t layer = 0;
  std::int64_t capacity =
      0;  ///< expert_choice: tokens per expert, at most T; 0: ceil(T*K/E), of T tokens without padding
  bool replay = false;  ///< the caller gives topk_ids; the router scores them
  bool operator==(Router const&) const = default;
};

/// Where a score multiplies: after the down projection (default), on its input, or on x.
enum class ScorePosition : std::int32_t { output = 0, activation = 1, input = 2 };

/// Says what forward leaves for backward: h and the routing tables; the tables only (h is recomputed
/// from x); or nothing at all (inference).
enum class SavePolicy : std::int32_t { h = 0, x = 1, none = 2 };

/// Says who groups the rows: the layer (slots of tokens), or the caller ahead of the call (post-dispatch:
/// x rows already sorted by expert, with E+1 offsets, E end offsets or E counts).
enum class RowGrouping : std::int32_t { slots = 0, offsets = 1, ends = 2, counts = 3 };

/// Says what the GEMMs of a layer multiply. `native`: the storage type. The others quantise the operands of forward
/// and of the gradients of activations to e4m3, and save x and h as such codes with their scales; storage is bf16,
/// gradients of weights are sums of bf16 products (docs/numerics.md#a-layer-that-quantises).
enum class Precision : std::int32_t {
  native = 0,
  /// Blocks of 128, activations 1x128 and weights 128x128; hidden, intermediate: multiples of 128.
  fp8 = 1,
  /// Blocks of 32 with e8m0 scales; hidden, intermediate: multiples of 32.
  mxfp8 = 2,
  /// fp8 where it is served and expected to be faster than native, else native: shape, options and device decide, never
  /// data. chosen_precision() (moe.hpp) says which, explain() says why too.
  automatic = 3,
};

/// Everything that fixes the result of a layer call apart from the data.
struct MoeDesc {
  MoeShape shape = {};
  DType dtype =
      DType::fp32;  ///< storage type of x, weights, h, o and their gradients; router: below
  Activation activation = {};
  WeightLayout layout = {};
  bool bias = false;  ///< b_up [E,w*n] (or b_gate, b_up [E,n]) and b_down [E,d]
  Router router = {};
  ScorePosition score_position = ScorePosition::output;
  SavePolicy save = SavePolicy::h;
  RowGrouping grouping = RowGrouping::slots;
  /// Largest number of columns of y (in backward: of dx rows) that exist at a time: less workspace, equal bits. 0: all.
  std::int64_t column_chunk = 0;
  DType ids_dtype = DType::int32;  ///< of given ids and offsets: int32 or int64
  /// True if backward writes dh, or its codes if it quantises, over h, which is lost then: this saves workspace and
  /// changes no bit. SavePolicy::h only.
  bool overwrite_h = false;
  /// Storage type of w_router and b_router: none means dtype; fp32 beside bf16 is served, and computes logits and
  /// gradients from the fp32 weights as they are. Their gradients are fp32 then.
  DType router_dtype = DType::none;
  Precision precision = Precision::native;
  bool pow2_scales = false;  ///< Precision::fp8: scales are powers of two, rather than any fp32
  /// Precision::fp8, or automatic where that takes fp8: calls read weights as codes that quantise_weights()
  /// (low_precision.hpp) made once for all passes of a step, and quantise none: WeightCodes (moe.hpp) in place of
  /// w_up, w_gate and w_down, which are absent. Bits are those of calls that quantise.
  bool weight_codes = false;

  /// True if operands are quantised. Ask only once a `precision` of automatic has been resolved.
  [[nodiscard]] constexpr bool quantises() const noexcept {
    return precision == Precision::fp8 || precision == Precision::mxfp8;
  }
  /// Elements of a row that share a scale where operands are quantised.
  [[nodiscard]] constexpr std::int64_t scale_block() const noexcept {
    return precision == Precision::mxfp8 ? 32 : 128;
  }
  /// Returns what w_router and b_router are stored in.
  [[nodiscard]] constexpr DType router_storage() const noexcept {
    return router_dtype == DType::none ? dtype : router_dtype;
  }
  /// Width of h in units of n: 2 gated, 1 not.
  [[nodiscard]] constexpr std::int64_t up_width() const noexcept {
    return activation.gated() ? 2 : 1;
  }
  [[nodiscard]] constexpr bool rounds_tokens() const noexcept {
    return router.round != Rounding::none;
  }
  /// True if experts choose their tokens (expert_choice), rather than tokens their experts.
  [[nodiscard]] constexpr bool experts_choose() const noexcept {
    return router.kind == RouterKind::expert_choice && !router.replay;
  }
  /// True if tokens differ in their number of slots: `token_offsets` are part of the routing tables.
  [[nodiscard]] constexpr bool experts_vary() const noexcept {
    return shape.variable_experts || rounds_tokens() || experts_choose();
  }
  /// Tokens that each expert takes with expert_choice.
  [[nodiscard]] constexpr std::int64_t expert_capacity() const noexcept {
    return router.capacity != 0 ? router.capacity
                                : (shape.tokens * shape.top_k + shape.experts - 1) / shape.experts;
  }
  /// P, the slots that buffers hold: known before the data are. T*K, except for variable_experts (`slots`),
  /// expert_choice (E * capacity) and token rounding, where it bounds what can be routed: the slots from R on then
  /// belong to no token.
  [[nodiscard]] constexpr std::int64_t num_slots() const noexcept {
    if (shape.variable_experts) return shape.slots;
    if (experts_choose()) return shape.experts * expert_capacity();
    std::int64_t const chosen = shape.tokens * shape.top_k, tile = router.tile;
    std::int64_t const busy = std::min(shape.experts, chosen);  // at most so many experts round
    std::int64_t added = 0;
    switch (router.round) {
      case Rounding::nr_f:
        added = busy * ((tile + 1) / 2 - 1);
        break;
      case Rounding::balance_f:
        added = tile / 2;
        break;
      case Rounding::sr_f:
      case Rounding::nr_s:
      case Rounding::up:
        added = busy * (tile - 1);
        break;
      default:
        return chosen;
    }
    return std::min(chosen + added, shape.tokens * shape.experts);
  }
  bool operator==(MoeDesc const&) const = default;
};

}  // namespace tessera
