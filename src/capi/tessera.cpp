// SPDX-License-Identifier: Apache-2.0
// The C ABI on top of the C++ API: copies fields, adds no rules of its own.
#include "tessera/tessera.h"

#include <new>

#include "capi/convert.hpp"
#include "tessera/low_precision.hpp"
#include "tessera/router.hpp"

namespace {

using tessera::Status;
using tessera::StatusCode;
using namespace tessera::capi;

void set_weights(tessera::ExpertWeights& weights, tessera_expert_weights const& from) noexcept {
  set(weights.w_up, from.w_up);
  set(weights.w_gate, from.w_gate);
  set(weights.w_down, from.w_down);
  set(weights.b_up, from.b_up);
  set(weights.b_gate, from.b_gate);
  set(weights.b_down, from.b_down);
}

tessera::ExpertWeights weights_of(tessera_expert_weights const& from) noexcept {
  tessera::ExpertWeights weights;
  set_weights(weights, from);
  return weights;
}

tessera::WeightCodes codes_of(tessera_weight_codes const& from) noexcept {
  return {.up = tensor_of(from.up),
          .up_scales = tensor_of(from.up_scales),
          .down = tensor_of(from.down),
          .down_scales = tensor_of(from.down_scales),
          .up_transposed = tensor_of(from.up_transposed),
          .down_transposed = tensor_of(from.down_transposed)};
}

}  // namespace

Status tessera::capi::moe_desc_of(tessera_moe_desc const* desc, MoeDesc& out) noexcept {
  tessera_moe_desc from;
  TESSERA_TRY(read_struct("tessera_moe_desc", desc, from));
  out.shape = {from.tokens, from.hidden, from.intermediate,         from.experts,
               from.top_k,  from.slots,  from.variable_experts != 0};
  if (from.dtype != 0) out.dtype = static_cast<DType>(from.dtype);
  out.activation = activation_of(from.activation, from.alpha, from.limit, from.up_offset);
  out.layout = {static_cast<GateUpOrder>(from.layout_order),
                static_cast<WeightOrientation>(from.layout_orientation), from.layout_block};
  out.bias = from.bias != 0;
  out.score_position = static_cast<ScorePosition>(from.score_position);
  out.save = static_cast<SavePolicy>(from.save);
  out.grouping = static_cast<RowGrouping>(from.grouping);
  if (from.ids_dtype != 0) out.ids_dtype = static_cast<DType>(from.ids_dtype);
  out.router.kind = static_cast<RouterKind>(from.router);
  out.router.normalize_scores = from.normalize_scores != 0;
  out.router.groups = from.groups;
  out.router.top_groups = from.top_groups;
  out.router.round = static_cast<Rounding>(from.round);
  if (from.tile != 0) out.router.tile = from.tile;
  if (from.route_scale != 0) out.router.route_scale = from.route_scale;
  out.router.layer = from.layer;
  out.column_chunk = from.column_chunk;
  out.router.seed = from.seed;
  out.router.step = from.step;
  out.router.capacity = from.capacity;
  out.router.replay = from.replay != 0;
  out.overwrite_h = from.overwrite_h != 0;
  out.router_dtype = static_cast<DType>(from.router_dtype);
  out.precision = static_cast<Precision>(from.precision);
  out.pow2_scales = from.pow2_scales != 0;
  out.weight_codes = from.weight_codes != 0;
  return {};
}

Status tessera::capi::backward_args_of(tessera_backward_args const* c_args,
                                       MoeBackwardArgs& args) noexcept {
  tessera_backward_args room;
  tessera_backward_args const* read = nullptr;
  TESSERA_TRY(read_struct("tessera_backward_args", c_args, room, read));
  tessera_backward_args const& from = *read;
  set(args.d_o, from.d_o);
  set(args.x, from.x);
  set(args.h, from.h);
  args.routing = buffer_of(from.routing);
  set(args.w_router, from.w_router);
  set(args.b_router, from.b_router);
  set_weights(args.weights, from.weights);
  set(args.dx, from.dx);
  set(args.dscores, from.dscores);
  set(args.dlogits, from.dlogits);
  set(args.gradients.dw_up, from.dw_up);
  set(args.gradients.dw_gate, from.dw_gate);
  set(args.gradients.dw_down, from.dw_down);
  set(args.gradients.db_up, from.db_up);
  set(args.gradients.db_gate, from.db_gate);
  set(args.gradients.db_down, from.db_down);
  set(args.gradients.dw_router, from.dw_router);
  set(args.gradients.db_router, from.db_router);
  args.gradients.mode = static_cast<GradientMode>(from.accumulate);
  set(args.dh, from.dh);
  set(args.a_scaled, from.a_scaled);
  set(args.dlogits_saved, from.dlogits_saved);
  set(args.aux_dlogits, from.aux_dlogits);
  args.workspace = buffer_of(from.workspace);
  set(args.token_mask, from.token_mask);
  set(args.x8, from.x8);
  set(args.x_scale, from.x_scale);
  set(args.h_scale, from.h_scale);
  args.weight_codes = codes_of(from.weight_codes);
  return {};
}

namespace {

Status forward(tessera_context const* context, tessera_moe_desc const* c_desc,
               tessera_forward_args const* c_args, void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  tessera_forward_args from;
  TESSERA_TRY(read_struct("tessera_forward_args", c_args, from));
  tessera::MoeForwardArgs args;
  args.x = tensor_of(from.x);
  args.topk_ids = tensor_of(from.topk_ids);
  args.topk_weights = tensor_of(from.topk_weights);
  args.token_offsets = tensor_of(from.token_offsets);
  args.w_router = tensor_of(from.w_router);
  args.b_router = tensor_of(from.b_router);
  args.selection_bias = tensor_of(from.selection_bias);
  args.expert_offsets = tensor_of(from.expert_offsets);
  args.row_scores = tensor_of(from.row_scores);
  args.weights = weights_of(from.weights);
  args.o = tensor_of(from.o);
  args.logits = tensor_of(from.logits);
  args.expert_counts = tensor_of(from.expert_counts);
  args.topk_counts = tensor_of(from.topk_counts);
  args.h = tensor_of(from.h);
  args.routing = buffer_of(from.routing);
  args.workspace = buffer_of(from.workspace);
  args.token_mask = tensor_of(from.token_mask);
  args.x8 = tensor_of(from.x8);
  args.x_scale = tensor_of(from.x_scale);
  args.h_scale = tensor_of(from.h_scale);
  args.weight_codes = codes_of(from.weight_codes);
  return tessera::moe_forward(context->context, desc, args, {stream});
}

Status quantise_weights(tessera_context const* context, tessera_moe_desc const* c_desc,
                        tessera_expert_weights const* weights, tessera_weight_codes const* out,
                        void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  if (weights == nullptr || out == nullptr) {
    return Status::invalid("weights or codes: null; pass the structs of both");
  }
  tessera::QuantisedWeights codes;
  codes.up = tensor_of(out->up);
  codes.up_scales = tensor_of(out->up_scales);
  codes.down = tensor_of(out->down);
  codes.down_scales = tensor_of(out->down_scales);
  codes.up_transposed = tensor_of(out->up_transposed);
  codes.down_transposed = tensor_of(out->down_transposed);
  return tessera::quantise_weights(context->context, desc, weights_of(*weights),
                                   tessera::scale_rule(desc), codes, {stream});
}

using BackwardFunction = Status (*)(tessera::Context const&, tessera::MoeDesc const&,
                                    tessera::MoeBackwardArgs const&, tessera::Stream) noexcept;

Status backward(BackwardFunction function, tessera_context const* context,
                tessera_moe_desc const* c_desc, tessera_backward_args const* c_args,
                void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  tessera::MoeBackwardArgs args;
  TESSERA_TRY(backward_args_of(c_args, args));
  return function(context->context, desc, args, {stream});
}

Status route(tessera_context const* context, tessera_moe_desc const* c_desc,
             tessera_route_args const* c_args, void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  tessera_route_args from;
  TESSERA_TRY(read_struct("tessera_route_args", c_args, from));
  tessera::RouteArgs args;
  args.x = tensor_of(from.x);
  args.w_router = tensor_of(from.w_router);
  args.b_router = tensor_of(from.b_router);
  args.selection_bias = tensor_of(from.selection_bias);
  args.topk_ids = tensor_of(from.topk_ids);
  args.topk_weights = tensor_of(from.topk_weights);
  args.token_offsets = tensor_of(from.token_offsets);
  args.logits = tensor_of(from.logits);
  args.workspace = buffer_of(from.workspace);
  args.token_mask = tensor_of(from.token_mask);
  return tessera::route(context->context, desc, args, {stream});
}

Status routing_of_groups(tessera_context const* context, tessera_moe_desc const* c_desc,
                         tessera::GroupedRoutingArgs const& args, void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  return tessera::routing_of_groups(context->context, desc, args, {stream});
}

Status router_loss(tessera_context const* context, tessera_moe_desc const* c_desc,
                   tessera_router_loss_args const* c_args, void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  tessera_router_loss_args from;
  TESSERA_TRY(read_struct("tessera_router_loss_args", c_args, from));
  tessera::RouterLossArgs args;
  args.logits = tensor_of(from.logits);
  args.topk_counts = tensor_of(from.topk_counts);
  args.scope_tokens = from.scope_tokens;
  args.balance = from.balance;
  args.z = from.z;
  if (from.d_loss != 0) args.d_loss = from.d_loss;
  args.losses = tensor_of(from.losses);
  args.dlogits = tensor_of(from.dlogits);
  args.workspace = buffer_of(from.workspace);
  args.token_mask = tensor_of(from.token_mask);
  args.topk_ids = tensor_of(from.topk_ids);
  args.sequence_offsets = tensor_of(from.sequence_offsets);
  args.sequence_loss = tensor_of(from.sequence_loss);
  args.sequence_balance = from.sequence_balance;
  return tessera::router_loss(context->context, desc, args, {stream});
}

Status router_loss_workspace(tessera_context const* context, tessera_moe_desc const* c_desc,
                             std::int64_t sequences, std::size_t* bytes) noexcept {
  TESSERA_TRY(check_context(context));
  if (bytes == nullptr) return Status::invalid("bytes: null pointer; pass where to store it");
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const needed = tessera::router_loss_workspace_bytes(context->context, desc, sequences);
  if (!needed.ok()) return needed.status();
  *bytes = needed.value();
  return {};
}

Status update_selection_bias(tessera_context const* context,
                             tessera_selection_bias_args const* c_args, void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera_selection_bias_args from;
  TESSERA_TRY(read_struct("tessera_selection_bias_args", c_args, from));
  tessera::SelectionBiasArgs args;
  args.topk_counts = tensor_of(from.topk_counts);
  args.selection_bias = tensor_of(from.selection_bias);
  args.rate = from.rate;
  args.subtract_mean = from.subtract_mean != 0;
  return tessera::update_selection_bias(context->context, args, {stream});
}

Status grouped_gemm_args_of(tessera_grouped_gemm_args const* c_args,
                            tessera::GroupedGemmArgs& args) noexcept {
  tessera_grouped_gemm_args from;
  TESSERA_TRY(read_struct("tessera_grouped_gemm_args", c_args, from));
  args.kind = static_cast<tessera::GroupedGemmKind>(from.kind);
  args.transpose_b = from.transpose_b != 0;
  args.a = tensor_of(from.a);
  args.b = tensor_of(from.b);
  args.bias = tensor_of(from.bias);
  args.expert_offsets = tensor_of(from.expert_offsets);
  args.c = tensor_of(from.c);
  args.mode = static_cast<tessera::GradientMode>(from.accumulate);
  args.workspace = buffer_of(from.workspace);
  return {};
}

Status grouped_gemm(tessera_context const* context, tessera_grouped_gemm_args const* c_args,
                    void* stream) noexcept {
  TESSERA_TRY(check_context(context));
  tessera::GroupedGemmArgs args;
  TESSERA_TRY(grouped_gemm_args_of(c_args, args));
  return tessera::grouped_gemm(context->context, args, {stream});
}

Status grouped_gemm_workspace(tessera_context const* context,
                              tessera_grouped_gemm_args const* c_args,
                              std::size_t* bytes) noexcept {
  TESSERA_TRY(check_context(context));
  if (bytes == nullptr) return Status::invalid("bytes: null pointer; pass where to store it");
  tessera::GroupedGemmArgs args;
  TESSERA_TRY(grouped_gemm_args_of(c_args, args));
  auto const needed = tessera::grouped_gemm_workspace_bytes(context->context, args);
  if (!needed.ok()) return needed.status();
  *bytes = needed.value();
  return {};
}

Status create_context(std::int32_t device_kind, std::int32_t device_index, std::int32_t num_threads,
                      std::int32_t flags, tessera_context** out) noexcept {
  if (out == nullptr) return Status::invalid("context: null pointer; pass where to store it");
  *out = nullptr;
  if ((flags & ~TESSERA_UNPROVEN_KERNELS) != 0) {
    return Status::invalid("flags=%d: 0, or %d for TESSERA_UNPROVEN_KERNELS", flags,
                           TESSERA_UNPROVEN_KERNELS);
  }
  auto context = tessera::Context::create(
      {.device = {static_cast<tessera::DeviceKind>(device_kind), device_index},
       .num_threads = num_threads,
       .unproven_kernels = (flags & TESSERA_UNPROVEN_KERNELS) != 0});
  if (!context.ok()) return context.status();
  *out = new (std::nothrow) tessera_context{std::move(context).value()};
  return *out != nullptr ? Status()
                         : Status::error(StatusCode::out_of_memory, "no memory for a context");
}

Status workspace(tessera_context const* context, tessera_moe_desc const* c_desc, int pass,
                 std::size_t* bytes) noexcept {
  TESSERA_TRY(check_context(context));
  if (bytes == nullptr) return Status::invalid("bytes: null pointer; pass where to store it");
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const needed =
      tessera::workspace_bytes(context->context, desc, static_cast<tessera::Pass>(pass));
  if (!needed.ok()) return needed.status();
  *bytes = needed.value();
  return {};
}

Status scores_are_constant(tessera_moe_desc const* c_desc, std::int32_t* constant) noexcept {
  if (constant == nullptr) {
    return Status::invalid("constant: null pointer; pass where to store it");
  }
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const valid = tessera::routing_bytes(desc);  // every rule for the description
  if (!valid.ok()) return valid.status();
  *constant = scores_are_constant(desc) ? 1 : 0;
  return {};
}

Status precision(tessera_context const* context, tessera_moe_desc const* c_desc,
                 std::int32_t* chosen) noexcept {
  TESSERA_TRY(check_context(context));
  if (chosen == nullptr) {
    return Status::invalid("precision: null pointer; pass where to store it");
  }
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const of_calls = tessera::chosen_precision(context->context, desc);
  if (!of_calls.ok()) return of_calls.status();
  *chosen = static_cast<std::int32_t>(of_calls.value());
  return {};
}

Status saved(tessera_moe_desc const* c_desc, std::size_t* x_bytes, std::size_t* h_bytes,
             std::size_t* routing_bytes) noexcept {
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const bytes = tessera::saved_bytes(desc);
  if (!bytes.ok()) return bytes.status();
  if (x_bytes != nullptr) *x_bytes = bytes.value().x;
  if (h_bytes != nullptr) *h_bytes = bytes.value().h;
  if (routing_bytes != nullptr) *routing_bytes = bytes.value().routing;
  return {};
}

Status saved_scales(tessera_moe_desc const* c_desc, std::size_t* x_bytes,
                    std::size_t* h_bytes) noexcept {
  tessera::MoeDesc desc;
  TESSERA_TRY(moe_desc_of(c_desc, desc));
  auto const bytes = tessera::saved_bytes(desc);
  if (!bytes.ok()) return bytes.status();
  if (x_bytes != nullptr) *x_bytes = bytes.value().x_scale;
  if (h_bytes != nullptr) *h_bytes = bytes.value().h_scale;
  return {};
}

}  // namespace

TESSERA_C_API int tessera_abi_version(void) { return TESSERA_ABI_VERSION; }
TESSERA_C_API char const* tessera_version(void) { return TESSERA_VERSION; }
TESSERA_C_API char const* tessera_last_error(void) { return last_error; }

TESSERA_C_API int tessera_context_create(int32_t device_kind, int32_t device_index,
                                         int32_t num_threads, tessera_context** context) {
  return finish(create_context(device_kind, device_index, num_threads, 0, context));
}
TESSERA_C_API int tessera_context_create_with(int32_t device_kind, int32_t device_index,
                                              int32_t num_threads, int32_t flags,
                                              tessera_context** context) {
  return finish(create_context(device_kind, device_index, num_threads, flags, context));
}
TESSERA_C_API void tessera_context_destroy(tessera_context* context) { delete context; }
TESSERA_C_API int tessera_check_device_values(tessera_context const* context) {
  Status const status = check_context(context);
  return finish(status.ok() ? tessera::check_device_values(context->context) : status);
}

TESSERA_C_API int tessera_moe_workspace(tessera_context const* context,
                                        tessera_moe_desc const* desc, int pass, size_t* bytes) {
  return finish(workspace(context, desc, pass, bytes));
}
TESSERA_C_API int tessera_moe_scores_are_constant(tessera_moe_desc const* desc, int32_t* constant) {
  return finish(scores_are_constant(desc, constant));
}
TESSERA_C_API int tessera_moe_precision(tessera_context const* context,
                                        tessera_moe_desc const* desc, int32_t* chosen) {
  return finish(precision(context, desc, chosen));
}
TESSERA_C_API int tessera_moe_saved(tessera_moe_desc const* desc, size_t* x_bytes, size_t* h_bytes,
                                    size_t* routing_bytes) {
  return finish(saved(desc, x_bytes, h_bytes, routing_bytes));
}
TESSERA_C_API int tessera_moe_saved_scales(tessera_moe_desc const* desc, size_t* x_scale_bytes,
                                           size_t* h_scale_bytes) {
  return finish(saved_scales(desc, x_scale_bytes, h_scale_bytes));
}
TESSERA_C_API int tessera_quantise_weights(tessera_context const* context,
                                           tessera_moe_desc const* desc,
                                           tessera_expert_weights const* weights,
                                           tessera_weight_codes const* out, void* stream) {
  return finish(quantise_weights(context, desc, weights, out, stream));
}
TESSERA_C_API int tessera_moe_forward(tessera_context const* context, tessera_moe_desc const* desc,
                                      tessera_forward_args const* args, void* stream) {
  return finish(forward(context, desc, args, stream));
}
TESSERA_C_API int tessera_moe_backward(tessera_context const* context, tessera_moe_desc const* desc,
                                       tessera_backward_args const* args, void* stream) {
  return finish(backward(tessera::moe_backward, context, desc, args, stream));
}
TESSERA_C_API int tessera_moe_backward_input(tessera_context const* context,
                                             tessera_moe_desc const* desc,
                                             tessera_backward_args const* args, void* stream) {
  return finish(backward(tessera::moe_backward_input, context, desc, args, stream));
}
TESSERA_C_API int tessera_moe_backward_weights(tessera_context const* context,
                                               tessera_moe_desc const* desc,
                                               tessera_backward_args const* args, void* stream) {
  return finish(backward(tessera::moe_backward_weights, context, desc, args, stream));
}
TESSERA_C_API int tessera_route(tessera_context const* context, tessera_moe_desc const* desc,
                                tessera_route_args const* args, void* stream) {
  return finish(route(context, desc, args, stream));
}
TESSERA_C_API int tessera_routing_of_groups(tessera_context const* context,
                                            tessera_moe_desc const* desc,
                                            tessera_tensor expert_offsets,
                                            tessera_tensor row_scores, tessera_buffer routing,
                                            void* stream) {
  return finish(routing_of_groups(
      context, desc, {tensor_of(expert_offsets), tensor_of(row_scores), buffer_of(routing)},
      stream));
}
TESSERA_C_API int tessera_router_loss_workspace(tessera_context const* context,
                                                tessera_moe_desc const* desc, size_t* bytes) {
  return finish(router_loss_workspace(context, desc, 0, bytes));
}
TESSERA_C_API int tessera_router_loss_workspace_of(tessera_context const* context,
                                                   tessera_moe_desc const* desc, int64_t sequences,
                                                   size_t* bytes) {
  return finish(router_loss_workspace(context, desc, sequences, bytes));
}
TESSERA_C_API int tessera_router_loss(tessera_context const* context, tessera_moe_desc const* desc,
                                      tessera_router_loss_args const* args, void* stream) {
  return finish(router_loss(context, desc, args, stream));
}
TESSERA_C_API int tessera_update_selection_bias(tessera_context const* context,
                                                tessera_selection_bias_args const* args,
                                                void* stream) {
  return finish(update_selection_bias(context, args, stream));
}
TESSERA_C_API int tessera_grouped_gemm_workspace(tessera_context const* context,
                                                 tessera_grouped_gemm_args const* args,
                                                 size_t* bytes) {
  return finish(grouped_gemm_workspace(context, args, bytes));
}
TESSERA_C_API int tessera_grouped_gemm(tessera_context const* context,
                                       tessera_grouped_gemm_args const* args, void* stream) {
  return finish(grouped_gemm(context, args, stream));
}
