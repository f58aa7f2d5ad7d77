// SPDX-License-Identifier: Apache-2.0
// One MoE layer: o_t = sum over slots j of t of s_j * (act(x_t w_up[e_j]^T + b_up) w_down[e_j]^T + b_down)
//
// The caller owns all memory: outputs, saved tensors (h, routing) and workspace. Forward leaves h and the
// routing tables; backward needs these, x and the weights, nothing else.
#pragma once

#include <cstddef>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/routing.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

/// Weights of all experts; shapes by WeightLayout (shape.hpp). Last dimension contiguous.
struct ExpertWeights {
  ConstTensor w_up = {};
  ConstTensor w_gate = {};  ///< WeightOrientation::separate only
  ConstTensor w_down = {};
  ConstTensor b_up = {};    ///< with MoeDesc::bias: [E,w*n] in the order of w_up; separate: [E,n]
  ConstTensor b_gate = {};  ///< separate only, [E,n]
  ConstTensor b_down = {};  ///< [E,d]
};

/// With MoeDesc::weight_codes: the weights as quantise_weights() (low_precision.hpp) left them, by the scales that
/// MoeDesc::pow2_scales names; all contiguous, on a GPU at multiples of 16 bytes. They are those of the weights at that
/// time: whoever changes the weights has codes made anew. A call reads what is said here; the others may be there.
struct WeightCodes {
  ConstTensor up = {};               ///< [E,w,n,d] fp8_e4m3: forward; backward with SavePolicy::x
  ConstTensor up_scales = {};        ///< [E,n/128,d/128,w] fp32: both
  ConstTensor down = {};             ///< [E,d,n] fp8_e4m3: forward
  ConstTensor down_scales = {};      ///< [E,d/128,n/128] fp32: both
  ConstTensor up_transposed = {};    ///< [E,d,w*n] fp8_e4m3: backward, and moe_backward_input
  ConstTensor down_transposed = {};  ///< [E,n,d] fp8_e4m3: backward, and moe_backward_input
};

/// Inputs, outputs and memory of a forward call. Outputs may not overlap inputs.
struct MoeForwardArgs {
  ConstTensor x = {};  ///< [T,d]

  // RouterKind::given, or ids that a router scores (Router::replay; topk_weights are absent then): ids outside [0,E)
  // are sentinels, they own no row and add nothing.
  ConstTensor topk_ids = {};       ///< [T,K] (or [P] with token_offsets) int32 or int64
  ConstTensor topk_weights = {};   ///< same shape, fp32
  ConstTensor token_offsets = {};  ///< [T+1], with MoeShape::variable_experts

  // Any other router. w_router and b_router are of MoeDesc::router_storage().
  ConstTensor w_router = {};  ///< [E,d]
  ConstTensor b_router = {};  ///< [E], optional
  ConstTensor selection_bias =
      {};  ///< [E] fp32, optional: added to the key, not to the score; top-k only

  // RowGrouping other than slots (post-dispatch): x is [P,d], sorted by expert.
  ConstTensor expert_offsets = {};  ///< [E+1] offsets, or [E] ends or counts
  ConstTensor row_scores = {};      ///< [P] fp32, optional

  ExpertWeights weights = {};

  Tensor o = {};              ///< [T,d], every element is written
  Tensor logits = {};         ///< optional [T,E] fp32: the router's logits
  Tensor expert_counts = {};  ///< optional [E] int32: M_e
  Tensor topk_counts = {};    ///< optional [E] int32: f_e, what M_e was before token rounding

  /// [P,w*n], saved: required with SavePolicy::h, absent otherwise. With MoeDesc::quantises(): fp8_e4m3 codes.
  Tensor h = {};
  Buffer routing = {};  ///< routing_bytes(desc), saved: required unless SavePolicy::none
  Buffer workspace = {};

  /// Optional [T] uint8, for routers that choose: 0 stands for padding. Such a token gets no expert, o = 0 and no
  /// gradient, counts in no statistic, and takes no place from another: all else has the bits of the call without these
  /// rows. Its x is not read by experts; its logits mean nothing.
  ConstTensor token_mask = {};

  // With MoeDesc::quantises(), saved; else absent. x8 and x_scale unless SavePolicy::none, h_scale with SavePolicy::h.
  Tensor x8 = {};       ///< [T,d] fp8_e4m3: x in blocks along rows
  Tensor x_scale = {};  ///< fp8: fp32 [T,d/128]; mxfp8: e8m0 [T,d/32]
  /// Scales of h, whose gate half stands before its up half: fp8: fp32 [w*n/128, padded_scale_rows(P)], the padding 0;
  /// mxfp8: e8m0 [P,w*n/32].
  Tensor h_scale = {};
  WeightCodes weight_codes = {};  ///< with MoeDesc::weight_codes, else absent
};

/// Says how a weight gradient meets its buffer: overwrite it, or add the complete fp32 sum once.
enum class GradientMode : std::int32_t { write = 0, accumulate = 1 };

/// Weight gradients, in the layout of their weights, all fp32 or all of the storage type; those of an fp32 router are
/// always fp32. An absent tensor is skipped: not computed. With `write`, experts without rows get zeros; with
/// `accumulate` they are left as they are.
struct ExpertGradients {
  Tensor dw_up = {}, dw_gate = {}, dw_down = {};
  Tensor db_up = {}, db_gate = {}, db_down = {};
  Tensor dw_router = {}, db_router = {};
  GradientMode mode = GradientMode::write;
};

/// Inputs, outputs and memory of a backward call.
struct MoeBackwardArgs {
  ConstTensor d_o = {};  ///< [T,d]
  /// [T,d]; moe_backward_input reads it with SavePolicy::x only. Absent with MoeDesc::quantises(): x8 takes its place.
  ConstTensor x = {};
  /// [P,w*n] as forward left it (SavePolicy::h), its columns in an order that the backend chose; moe_backward_weights
  /// does not read it. With MoeDesc::overwrite_h it is written as well: afterwards it is dh.
  ConstTensor h = {};
  ConstBuffer routing = {};                  ///< as forward left it
  ConstTensor w_router = {}, b_router = {};  ///< as in forward, unless RouterKind::given
  ConstTensor aux_dlogits =
      {};  ///< optional [T,E] fp32: added to dlogits, e.g. the gradient of router_loss() (balance.hpp)
  ExpertWeights weights = {};  ///< as in forward; not read by moe_backward_weights

  Tensor dx = {};       ///< optional [T,d]
  Tensor dscores = {};  ///< optional [P] fp32 by slot; 0 at sentinels
  Tensor dlogits = {};  ///< optional [T,E] fp32, with a router
  ExpertGradients gradients = {};

  // Split backward: moe_backward_input leaves these for moe_backward_weights; absent in moe_backward.
  Tensor dh =
      {};  ///< [P,w*n]; absent in moe_backward_input with MoeDesc::overwrite_h, which leaves it in h
  Tensor a_scaled = {};       ///< [P,n]: s*a
  Tensor dlogits_saved = {};  ///< [T,E] fp32, with a router
  Buffer workspace = {};
  ConstTensor token_mask = {};  ///< as in forward; aux_dlogits of its padding are not read

  // With MoeDesc::quantises(), as forward left them: read where x and h are.
  ConstTensor x8 = {}, x_scale = {}, h_scale = {};
  WeightCodes weight_codes = {};  ///< with MoeDesc::weight_codes, else absent
};

/// Passes that have a workspace of their own size.
enum class Pass : std::int32_t {
  forward = 0,
  backward = 1,
  backward_input = 2,
  backward_weights = 3,
  route = 4,
};

/// Bytes that stay between forward and backward.
struct SavedBytes {
  /// T*d elements, which the layer that made x may have saved anyway; with MoeDesc::quantises() x8, which it has not.
  std::size_t x = 0;
  std::size_t h = 0;                     ///< P*w*n elements; 0 with SavePolicy::x
  std::size_t routing = 0;               ///< routing_bytes(desc)
  std::size_t x_scale = 0, h_scale = 0;  ///< with MoeDesc::quantises()
  [[nodiscard]] std::size_t total() const noexcept { return x + h + routing + x_scale + h_scale; }
};

/// The precision of `desc`, or, where that is automatic, what calls on this context take in its place: what is saved,
/// and whether codes of weights are read, depends on it. Equal for all passes. With MoeDesc::weight_codes: what they
/// take if codes are handed in. Errors: those of a call for this desc.
TESSERA_EXPORT Expected<Precision> chosen_precision(Context const& context,
                                                    MoeDesc const& desc) noexcept;

/// Bytes forward must leave behind, from the shape alone. Errors: invalid_argument for a bad desc, and for
/// Precision::automatic, for which a context has to be given.
TESSERA_EXPORT Expected<SavedBytes> saved_bytes(MoeDesc const& desc) noexcept;
/// Bytes forward must leave behind on this context. Errors: those of a call for this desc.
TESSERA_EXPORT Expected<SavedBytes> saved_bytes(Context const& context,
                                                MoeDesc const& desc) noexcept;

/// Bytes of workspace a pass needs on this context: from shape and options, never from data.
TESSERA_EXPORT Expected<std::size_t> workspace_bytes(Context const& context, MoeDesc const& desc,
                                                     Pass pass) noexcept;

/// Runs the layer forward. Reads x, weights and ids (or w_router); writes o, and h and routing as the
/// SavePolicy asks. On an error nothing was written. Deterministic: equal bits for any thread count,
/// stream and workspace content.
TESSERA_EXPORT Status moe_forward(Context const& context, MoeDesc const& desc,
                                  MoeForwardArgs const& args, Stream stream = {}) noexcept;

/// Activation and weight gradients in one call.
TESSERA_EXPORT Status moe_backward(Context const& context, MoeDesc const& desc,
                                   MoeBackwardArgs const& args, Stream stream = {}) noexcept;

/// dx, dscores, dlogits only; leaves dh and a_scaled (and dlogits_saved) in the caller's buffers.
TESSERA_EXPORT Status moe_backward_input(Context const& context, MoeDesc const& desc,
                                         MoeBackwardArgs const& args, Stream stream = {}) noexcept;

/// Weight gradients only, from what moe_backward_input left.
TESSERA_EXPORT Status moe_backward_weights(Context const& context, MoeDesc const& desc,
                                           MoeBackwardArgs const& args,
                                           Stream stream = {}) noexcept;

}  // namespace tessera
