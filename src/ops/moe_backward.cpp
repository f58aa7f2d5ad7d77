// SPDX-License-Identifier: Apache-2.0
// moe_backward: down_projection_dgrad -> router -> down_projection_wgrad -> up_projection_dgrad ->
// aggregate -> up_projection_wgrad. dx rows reuse the memory of a_scaled.
#include "core/gathered_rows.hpp"
#include "core/gradient_dtype.hpp"
#include "cpu/parallel/ops.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/plan.hpp"
#include "ops/quantised_rows.hpp"
#include "ops/router_args.hpp"
#include "ops/split_backward.hpp"
#include "ops/support.hpp"
#include "ops/tensors.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

bool has_router(MoeDesc const& desc) noexcept { return desc.router.kind != RouterKind::given; }

// h as the memory that MoeDesc::overwrite_h lets backward write.
Tensor written_h(ConstTensor const& h) noexcept {
  Tensor out;
  static_cast<BasicTensor<void*>&>(out) = {const_cast<void*>(h.data), h.dtype, h.device, h.rank};
  for (int axis = 0; axis < kMaxRank; ++axis) {
    out.shape[axis] = h.shape[axis];
    out.stride[axis] = h.stride[axis];
  }
  return out;
}

void visit_split(MoeDesc const& desc, MoeBackwardArgs const& args, Pass pass,
                 core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  if (pass == Pass::backward) {
    constexpr char const* kReason = "only a split backward takes it";
    visitor.absent("dh", args.dh, kReason);
    visitor.absent("a_scaled", args.a_scaled, kReason);
    visitor.absent("dlogits_saved", args.dlogits_saved, kReason);
    return;
  }
  bool const writes = pass == Pass::backward_input;
  auto const add = [&](char const* name, Tensor const& tensor, DType dtype, std::int64_t rows,
                       std::int64_t columns) {
    writes ? visitor.output(name, tensor, dtype, {rows, columns})
           : visitor.input(name, tensor, dtype, {rows, columns});
    visitor.contiguous(name, tensor);
  };
  if (writes && desc.overwrite_h && !desc.quantises()) {
    visitor.absent("dh", args.dh, "overwrite_h leaves it in h");
  } else {
    add("dh", args.dh, desc.dtype, desc.num_slots(), desc.up_width() * s.intermediate);
  }
  add("a_scaled", args.a_scaled, desc.dtype, desc.num_slots(), s.intermediate);
  if (has_router(desc)) {
    add("dlogits_saved", args.dlogits_saved, DType::fp32, s.tokens, s.experts);
  } else {
    visitor.absent("dlogits_saved", args.dlogits_saved, "router given has no logits");
  }
}

void visit_router_gradients(MoeDesc const& desc, MoeBackwardArgs const& args, bool input,
                            bool weights, core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  auto const& g = args.gradients;
  if (!has_router(desc)) {
    constexpr char const* kReason = "router given has no weights or logits";
    visitor.absent("w_router", args.w_router, kReason);
    visitor.absent("b_router", args.b_router, kReason);
    visitor.absent("dlogits", args.dlogits, kReason);
    visitor.absent("aux_dlogits", args.aux_dlogits, kReason);
    visitor.absent("dw_router", g.dw_router, kReason);
    visitor.absent("db_router", g.db_router, kReason);
    return;
  }
  if (input) {
    ops::visit_router_weights(desc, args.w_router, args.b_router, visitor);
    visitor.optional_input("aux_dlogits", args.aux_dlogits, DType::fp32, {s.tokens, s.experts});
    visitor.optional_output("dlogits", args.dlogits, DType::fp32, {s.tokens, s.experts});
  } else {
    visitor.optional_input("b_router", args.b_router, desc.router_storage(), {s.experts});
    visitor.absent("aux_dlogits", args.aux_dlogits, "backward_input adds it");
    visitor.absent("dlogits", args.dlogits, "backward_input writes it");
  }
  if (weights) {
    DType const dtype = core::router_gradient_dtype(desc, g);
    visitor.optional_output("dw_router", g.dw_router, dtype, {s.experts, s.hidden});
    visitor.optional_output("db_router", g.db_router, dtype, {s.experts});
  } else {
    visitor.absent("dw_router", g.dw_router, "backward_weights writes it");
    visitor.absent("db_router", g.db_router, "backward_weights writes it");
  }
}

}  // namespace

void ops::visit_tensors(MoeDesc const& desc, MoeBackwardArgs const& args, Pass pass,
                        std::size_t workspace, core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  bool const input = pass != Pass::backward_weights, weights = pass != Pass::backward_input;
  visitor.input("d_o", args.d_o, desc.dtype, {s.tokens, s.hidden});
  bool const recompute = input && desc.save == SavePolicy::x;
  if (desc.quantises()) {
    visitor.absent("x", args.x, "precision fp8 and mxfp8 read x8");
  } else if (weights || recompute) {
    visitor.input("x", args.x, desc.dtype, {s.tokens, s.hidden});
  }
  visit_saved_scales(desc, args.x8, args.x_scale, args.h_scale, weights || recompute,
                     input && !recompute, visitor);
  visitor.buffer("routing", args.routing, routing_table_bytes(desc), 4, false);
  if (input) {
    if (recompute) {
      visitor.absent("h", args.h, "SavePolicy::x recomputes it");
    } else {
      auto const shape = {desc.num_slots(), desc.up_width() * s.intermediate};
      DType const dtype = desc.quantises() ? DType::fp8_e4m3 : desc.dtype;
      desc.overwrite_h ? visitor.output("h", written_h(args.h), dtype, shape)
                       : visitor.input("h", args.h, dtype, shape);
      visitor.contiguous("h", args.h);
    }
    visit_weights(desc, args.weights, visitor);
    visit_weight_codes(desc, args.weight_codes, false, true, visitor);
    visitor.optional_output("dx", args.dx, desc.dtype, {core::dx_rows(desc), s.hidden});
    visitor.optional_output("dscores", args.dscores, DType::fp32, {desc.num_slots()});
    visitor.contiguous("dscores", args.dscores);
  } else {
    visitor.absent("dx", args.dx, "backward_input writes it");
    visitor.absent("dscores", args.dscores, "backward_input writes it");
  }
  if (weights) {
    visit_gradients(desc, args.gradients, visitor);
  } else {
    for (Tensor const* const gradient :
         {&args.gradients.dw_up, &args.gradients.dw_gate, &args.gradients.dw_down,
          &args.gradients.db_up, &args.gradients.db_gate, &args.gradients.db_down}) {
      visitor.absent("gradients", *gradient, "backward_weights writes them");
    }
  }
  visit_router_gradients(desc, args, input, weights, visitor);
  visit_token_mask(desc, args.token_mask, visitor);
  visit_split(desc, args, pass, visitor);
  visitor.buffer("workspace", args.workspace, workspace, 1, true);
}

namespace {

Status check_backward(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                      Pass pass, std::size_t workspace) noexcept {
  if (desc.save == SavePolicy::none) {
    return Status::invalid("save=none: an inference pass leaves nothing for backward; use save=h");
  }
  return ops::check_tensors(context.device(), desc, args, pass, workspace);
}

/// The arrays of one backward pass, in the workspace or in the caller's buffers.
template <class T>
struct Backward {
  cpu::Layer<T> layer;
  MoeBackwardArgs const& args;
  cpu::Threads threads;
  T* recomputed_h = nullptr;  ///< in the place of dh; null: forward saved h
  T* dh = nullptr;            ///< may be h
  T* a_scaled = nullptr;
  T* dx_rows = nullptr;
  float* expert = nullptr;        ///< where operands are quantised: one expert's weights
  T* dequantised_x = nullptr;     ///< where operands are quantised: x^, in the place of dx_rows
  float* dscores = nullptr;       ///< null: not wanted
  cpu::MutableRows dlogits = {};  ///< null without a router

  [[nodiscard]] cpu::ConstRows const_dlogits() const noexcept {
    return {dlogits.data, dlogits.pitch};
  }

  static constexpr bool kMayQuantise = std::is_same_v<T, cpu::Bf16>;

  [[nodiscard]] cpu::QuantisedRows x8() const noexcept {
    return ops::x8_rows(layer.desc, args.x8.data, args.x_scale.data);
  }
  /// The rows that weight gradients read: x, or x^ made of x8 in a place where nothing of the workspace is alive then.
  [[nodiscard]] cpu::Rows<T const> x() const noexcept {
    if (layer.desc.quantises()) return {dequantised_x, layer.hidden()};
    return ops::rows_of<T>(args.x);
  }
  void make_x() const noexcept {
    if constexpr (kMayQuantise) {
      if (layer.desc.quantises()) cpu::dequantise_x(layer.desc, x8(), dequantised_x, threads);
    }
  }

  void down_dgrad() const noexcept {
    if constexpr (kMayQuantise) {
      if (layer.desc.quantises()) {
        return cpu::quantised_down_dgrad(
            layer,
            {.d_o = ops::rows_of<T>(args.d_o),
             .x8 = x8(),
             .h8 = ops::h8_rows(layer.desc, args.h.data, args.h_scale.data),
             .dh = dh,
             .a_scaled = a_scaled,
             .dscores = dscores,
             .expert = expert},
            threads);
      }
    }
    if (recomputed_h != nullptr) {
      cpu::up_projection_fwd(layer, ops::rows_of<T>(args.x), recomputed_h, static_cast<T*>(nullptr),
                             threads);
    }
    cpu::down_projection_dgrad(
        layer,
        cpu::DownDgradArgs<T>{
            .d_o = ops::rows_of<T>(args.d_o),
            .h = recomputed_h != nullptr ? recomputed_h : static_cast<T const*>(args.h.data),
            .dh = dh,
            .a_scaled = a_scaled,
            .dscores = dscores},
        threads);
  }

  void activations() const noexcept {
    down_dgrad();
    if (has_router(layer.desc)) {
      cpu::ConstRows const initial =
          args.aux_dlogits.present() ? ops::rows_of(args.aux_dlogits) : cpu::ConstRows{};
      cpu::router_dlogits(layer.desc, layer.routing,
                          {.dscores = dscores,
                           .initial = initial,
                           .dlogits = dlogits,
                           .token_mask = ops::mask_of(args.token_mask)},
                          threads);
    }
  }

  void up_dgrad(cpu::Columns columns) const noexcept {
    if constexpr (kMayQuantise) {
      if (layer.desc.quantises()) {
        return cpu::quantised_up_dgrad(layer, dh, dx_rows, expert, threads);
      }
    }
    cpu::up_projection_dgrad(layer, static_cast<T const*>(dh), columns, dx_rows, threads);
  }

  void input_gradient() const noexcept {
    if (!args.dx.present()) return;
    cpu::Rows<T> const dx = ops::rows_of<T>(args.dx);
    bool const routed = has_router(layer.desc);
    if (routed) {
      ops::with_router_storage(layer.desc, [&]<class X, class W>(X, W) {
        if constexpr (std::is_same_v<X, T>) {
          cpu::router_dgrad(layer.desc, const_dlogits(), ops::rows_of<W>(args.w_router), dx,
                            threads);
        }
      });
    }
    cpu::for_each_column_chunk(layer.desc, [&](cpu::Columns columns) {
      up_dgrad(columns);
      cpu::aggregate(layer,
                     cpu::AggregateArgs<T>{.rows = dx_rows,
                                           .columns = columns,
                                           .scores = nullptr,
                                           .add_to_out = routed,
                                           .out = dx},
                     threads);
    });
  }

  /// run(G{}) with the type of the weight gradients.
  template <class Run>
  void with_gradients(DType dtype, Run&& run) const noexcept {
    if constexpr (!std::is_same_v<T, float>) {
      if (dtype != DType::fp32) return run(T{});
    }
    run(float{});
  }

  void down_weights() const noexcept {
    with_gradients(core::gradient_dtype(layer.desc, args.gradients), [&]<class G>(G) {
      cpu::down_projection_wgrad(
          layer,
          cpu::DownWgradArgs<T, G>{.d_o = ops::rows_of<T>(args.d_o),
                                   .a_scaled = a_scaled,
                                   .dw_down = ops::down_matrices<G>(layer.desc, args.gradients),
                                   .db_down = ops::down_biases<G>(args.gradients),
                                   .mode = args.gradients.mode},
          threads);
    });
  }

  void up_weights() const noexcept {
    ExpertGradients const& gradients = args.gradients;
    with_gradients(core::gradient_dtype(layer.desc, gradients), [&]<class G>(G) {
      cpu::up_projection_wgrad(
          layer,
          cpu::UpWgradArgs<T, G>{.x = x(),
                                 .dh = dh,
                                 .dw_up = ops::up_matrices<G>(layer.desc, gradients),
                                 .db_up = ops::up_biases<G>(layer.desc, gradients),
                                 .mode = gradients.mode},
          threads);
    });
  }

  void router_weights() const noexcept {
    if (!has_router(layer.desc)) return;
    ExpertGradients const& gradients = args.gradients;
    with_gradients(core::router_gradient_dtype(layer.desc, gradients), [&]<class G>(G) {
      cpu::router_wgrad(
          layer.desc,
          cpu::RouterWgradArgs<T, G>{.dlogits = const_dlogits(),
                                     .x = x(),
                                     .dw_router = gradients.dw_router.present()
                                                      ? ops::rows_of<G>(gradients.dw_router)
                                                      : cpu::Rows<G>{},
                                     .db_router = static_cast<G*>(gradients.db_router.data),
                                     .mode = gradients.mode,
                                     .token_mask = ops::mask_of(args.token_mask)},
          threads);
    });
  }

  void copy_dlogits() const noexcept {
    if (!args.dlogits.present()) return;
    cpu::MutableRows const out = ops::rows_of(args.dlogits);
    for (std::int64_t t = 0; t < layer.tokens(); ++t) {
      for (std::int64_t e = 0; e < layer.experts(); ++e) out[t][e] = dlogits[t][e];
    }
  }
};

// Tables are only read here; their view has one type for both passes.
RoutingView view_tables(MoeDesc const& desc, MoeBackwardArgs const& args) noexcept {
  return ops::view_routing(desc, const_cast<void*>(args.routing.data));
}

template <class T>
Backward<T> backward_of(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                        ops::BackwardPlan const& plan, Pass pass) noexcept {
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  bool const split = pass != Pass::backward;
  RoutingView const routing = view_tables(desc, args);
  Backward<T> out{{desc, routing, ops::up_matrices<T>(desc, args.weights),
                   ops::down_matrices<T>(desc, args.weights), ops::up_biases<T>(desc, args.weights),
                   ops::down_biases<T>(args.weights), args.weight_codes},
                  args,
                  {context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread}};
  if (desc.overwrite_h && !desc.quantises() && pass != Pass::backward_weights) {
    out.dh = static_cast<T*>(const_cast<void*>(args.h.data));
  } else {
    out.dh = split ? static_cast<T*>(args.dh.data) : plan.dh.in<T>(base);
  }
  if (desc.save == SavePolicy::x && pass != Pass::backward_weights) out.recomputed_h = out.dh;
  out.dx_rows = plan.a_or_dx.in<T>(base);
  out.dequantised_x = out.dx_rows;
  out.expert = plan.expert.in(base);
  out.a_scaled = split ? static_cast<T*>(args.a_scaled.data) : plan.a_or_dx.in<T>(base);
  out.dscores = args.dscores.present() ? static_cast<float*>(args.dscores.data)
                : has_router(desc)     ? plan.dscores.in(base)
                                       : nullptr;
  if (has_router(desc)) {
    out.dlogits = {split ? static_cast<float*>(args.dlogits_saved.data) : plan.dlogits.in(base),
                   desc.shape.experts};
  }
  return out;
}

Status backward_on_cuda(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                        Pass pass, Stream stream, cuda::SplitBackward split) noexcept {
  TESSERA_TRY(check_backward(context, desc, args, pass,
                             cuda::workspace_bytes(desc, pass, ops::routing_table_bytes(desc))));
  return cuda::moe_backward(*context.cuda(), desc, args, view_tables(desc, args), pass, stream,
                            split);
}

/// Checks, then calls run(backward) with the arrays of the pass; on a GPU: enqueues the pass.
template <class Run>
Status run_backward(Context const& context, MoeDesc const& given, MoeBackwardArgs const& args,
                    Pass pass, Stream stream, cuda::SplitBackward split, Run&& run) noexcept {
  TESSERA_TRY(ops::check_supported(context, given));
  MoeDesc const desc = ops::resolved(context, given);
  if (context.cuda() != nullptr) {
    return backward_on_cuda(context, desc, args, pass, stream, split);
  }
  ops::BackwardPlan const plan = ops::plan_backward(context, desc, pass);
  TESSERA_TRY(check_backward(context, desc, args, pass, plan.bytes));
  ops::with_storage(desc.dtype,
                    [&]<class T>(T) { run(backward_of<T>(context, desc, args, plan, pass)); });
  return {};
}

}  // namespace

Status moe_backward(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                    Stream stream) noexcept {
  return run_backward(context, desc, args, Pass::backward, stream, {}, [](auto const& backward) {
    backward.activations();
    backward.copy_dlogits();
    backward.down_weights();  // the last reader of a_scaled: dx rows may take its place
    backward.input_gradient();
    backward.make_x();
    backward.up_weights();
    backward.router_weights();
  });
}

Status ops::backward_input(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                           Stream stream, cuda::SplitBackward split) noexcept {
  return run_backward(context, desc, args, Pass::backward_input, stream, split,
                      [](auto const& backward) {
                        backward.activations();
                        backward.copy_dlogits();
                        backward.input_gradient();
                      });
}

Status ops::backward_weights(Context const& context, MoeDesc const& desc,
                             MoeBackwardArgs const& args, Stream stream,
                             cuda::SplitBackward split) noexcept {
  return run_backward(context, desc, args, Pass::backward_weights, stream, split,
                      [](auto const& backward) {
                        backward.down_weights();
                        backward.make_x();
                        backward.up_weights();
                        backward.router_weights();
                      });
}

Status moe_backward_input(Context const& context, MoeDesc const& desc, MoeBackwardArgs const& args,
                          Stream stream) noexcept {
  return ops::backward_input(context, desc, args, stream, {});
}

Status moe_backward_weights(Context const& context, MoeDesc const& desc,
                            MoeBackwardArgs const& args, Stream stream) noexcept {
  return ops::backward_weights(context, desc, args, stream, {});
}

}  // namespace tessera
