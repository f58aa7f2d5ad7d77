// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/low_precision.hpp"

#include <cuda_runtime_api.h>

#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/device.hpp"
#include "cuda/layer/quantised_kernels.hpp"

namespace tessera::cuda {
namespace {

constexpr std::uintptr_t kAlignment = 16;
constexpr std::int64_t kVector = 8;  // elements of bf16 in 16 bytes

Status refused(char const* name, char const* what) noexcept {
  return Status::unsupported(
      "%s: %s, and kernels of precision fp8 and mxfp8 copy 16 bytes at a time; copy it into "
      "contiguous, aligned memory",
      name, what);
}

Status check_base(char const* name, void const* gmem) noexcept {
  if (reinterpret_cast<std::uintptr_t>(gmem) % kAlignment == 0) return {};
  return refused(name, "its address is no multiple of 16");
}

Status check_rows(char const* name, MatrixRows const& rows) noexcept {
  TESSERA_TRY(check_base(name, rows.gmem));
  if (rows.rows <= 1 || rows.pitch % kVector == 0) return {};
  return refused(name, "its rows are no multiple of 16 bytes apart");
}

Status check_weight(char const* name, WeightRows const& w, std::int64_t rows) noexcept {
  TESSERA_TRY(check_base(name, w.gmem));
  std::int64_t const between_lines = w.column_stride == 1 ? w.row_stride : w.column_stride;
  bool const in_blocks = w.block < rows;
  if (w.expert_stride % kVector == 0 && between_lines % kVector == 0 &&
      (!in_blocks || w.block_stride % kVector == 0)) {
    return {};
  }
  return refused(name, "a stride of it is no multiple of 16 bytes");
}

Status check_weights(MoeDesc const& desc, ExpertWeights const& weights) noexcept {
  WeightViews const views = weight_views(desc, weights);
  for (WeightRows const& half : views.w_up) {
    if (half.gmem != nullptr) TESSERA_TRY(check_weight("w_up", half, desc.shape.intermediate));
  }
  return check_weight("w_down", views.w_down, desc.shape.hidden);
}

/// Codes of weights; absent ones lie at 0.
template <class AnyCodes>
Status check_codes(AnyCodes const& codes) noexcept {
  TESSERA_TRY(check_base("weight_codes.up", codes.up.data));
  TESSERA_TRY(check_base("weight_codes.down", codes.down.data));
  TESSERA_TRY(check_base("weight_codes.up_transposed", codes.up_transposed.data));
  return check_base("weight_codes.down_transposed", codes.down_transposed.data);
}

Status check_weights(MoeDesc const& desc, ExpertWeights const& weights,
                     WeightCodes const& codes) noexcept {
  return desc.weight_codes ? check_codes(codes) : check_weights(desc, weights);
}

/// Checks what forward leaves to backward; kernels of mxfp8 read words of scales.
template <class Args>
Status check_saved(MoeDesc const& desc, Args const& args) noexcept {
  TESSERA_TRY(check_base("x8", args.x8.data));
  TESSERA_TRY(check_base("h", args.h.data));
  if (desc.precision != Precision::mxfp8) return {};
  TESSERA_TRY(check_base("x_scale", args.x_scale.data));
  return check_base("h_scale", args.h_scale.data);
}

std::int32_t experts_of(MoeDesc const& desc) noexcept {
  return static_cast<std::int32_t>(desc.shape.experts);
}

std::int32_t const* gather_index(MoeDesc const& desc, RoutingView const& tables) noexcept {
  return desc.grouping == RowGrouping::slots ? tables.gather_index : nullptr;
}

template <class AnyTensor>
Codes codes_of(AnyTensor const& codes, AnyTensor const& scales) noexcept {
  return {const_cast<void*>(static_cast<void const*>(codes.data)),
          Scales(const_cast<void*>(static_cast<void const*>(scales.data)))};
}
Codes codes_of(CodesRegion const& region, std::byte* base) noexcept {
  return {region.codes.in(base), Scales(region.scales.in(base))};
}

void add_quantised(char const* op, MoeDesc const& desc, QuantisedMatrices const& matrices,
                   Sequence& sequence) noexcept {
  sequence.add(op, [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.quantise_weights(matrices, desc.pow2_scales, stream);
    });
  });
}

/// w_up [E,w*n,d], w the matrices of an expert's first projection: its codes, and those of its transpose; a place that
/// is null is not written.
void add_quantised_up(MoeDesc const& desc, WeightViews const& views, Codes const& to,
                      Codes const& to_transposed, Sequence& sequence) noexcept {
  add_quantised("quantise w_up", desc,
                {.w = {views.w_up[0], views.w_up[1]},
                 .rows = desc.shape.intermediate,
                 .width = desc.shape.hidden,
                 .halves = static_cast<std::int32_t>(desc.up_width()),
                 .experts = experts_of(desc),
                 .to = to,
                 .to_transposed = to_transposed},
                sequence);
}

/// The same of w_down [E,d,n].
void add_quantised_down(MoeDesc const& desc, WeightRows const& w_down, Codes const& to,
                        Codes const& to_transposed, Sequence& sequence) noexcept {
  add_quantised("quantise w_down", desc,
                {.w = {w_down},
                 .rows = desc.shape.hidden,
                 .width = desc.shape.intermediate,
                 .halves = 1,
                 .experts = experts_of(desc),
                 .to = to,
                 .to_transposed = to_transposed},
                sequence);
}

/// w_up, or w_down, along rows as forward reads them: the call's codes, or those that are made into `own`.
Codes forward_up(MoeDesc const& desc, ExpertWeights const& weights, WeightCodes const& given,
                 Codes const& own, Sequence& sequence) noexcept {
  if (desc.weight_codes) return codes_of(given.up, given.up_scales);
  add_quantised_up(desc, weight_views(desc, weights), own, {}, sequence);
  return own;
}
Codes forward_down(MoeDesc const& desc, ExpertWeights const& weights, WeightCodes const& given,
                   Codes const& own, Sequence& sequence) noexcept {
  if (desc.weight_codes) return codes_of(given.down, given.down_scales);
  add_quantised_down(desc, weight_views(desc, weights).w_down, own, {}, sequence);
  return own;
}

/// Their transposes, whose scales the call's codes do not have: these go to `own`.
Codes with_turned_scales(char const* op, ConstTensor const& codes,
                         TurnScalesArguments const& scales, Sequence& sequence) noexcept {
  sequence.add(op, [&](cudaStream_t stream) { return launch_turn_scales(scales, stream); });
  return {const_cast<void*>(codes.data), Scales(scales.gmem_scales_t)};
}
Codes backward_up(MoeDesc const& desc, MoeBackwardArgs const& args, Codes const& own,
                  Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  if (!desc.weight_codes) {
    add_quantised_up(desc, weight_views(desc, args.weights), {}, own, sequence);
    return own;
  }
  return with_turned_scales(
      "scales of w_up", args.weight_codes.up_transposed,
      {.gmem_scales = static_cast<float const*>(args.weight_codes.up_scales.data),
       .gmem_scales_t = own.gmem_scales,
       .down = s.intermediate / kScaleBlock,
       .across = s.hidden / kScaleBlock,
       .halves = static_cast<std::int32_t>(desc.up_width()),
       .experts = experts_of(desc)},
      sequence);
}
Codes backward_down(MoeDesc const& desc, MoeBackwardArgs const& args, Codes const& own,
                    Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  if (!desc.weight_codes) {
    add_quantised_down(desc, weight_views(desc, args.weights).w_down, {}, own, sequence);
    return own;
  }
  return with_turned_scales(
      "scales of w_down", args.weight_codes.down_transposed,
      {.gmem_scales = static_cast<float const*>(args.weight_codes.down_scales.data),
       .gmem_scales_t = own.gmem_scales,
       .down = s.hidden / kScaleBlock,
       .across = s.intermediate / kScaleBlock,
       .halves = 1,
       .experts = experts_of(desc)},
      sequence);
}

/// A [T,d] tensor.
void add_quantised_rows(char const* op, MoeDesc const& desc, MatrixRows const& rows,
                        Codes const& to, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  MatrixRows const x{rows.gmem, s.tokens, s.tokens > 1 ? rows.pitch : s.hidden};
  sequence.add(op, [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.quantise_rows(x, s.hidden, desc.pow2_scales, to, stream);
    });
  });
}

Codes h8_of(MoeDesc const& desc, MoeBackwardArgs const& args, BackwardPlan const& plan,
            std::byte* base) noexcept {
  return desc.save == SavePolicy::x ? codes_of(plan.h8, base) : codes_of(args.h, args.h_scale);
}

Codes dh8_of(MoeDesc const& desc, MoeBackwardArgs const& args, BackwardPlan const& plan,
             std::byte* base) noexcept {
  return desc.overwrite_h ? codes_of(args.h, args.h_scale) : codes_of(plan.dh8, base);
}

/// `a` null: h alone.
void add_up_projection(MoeDesc const& desc, RoutingView const& tables, Codes const& x,
                       Codes const& w_up, Codes const& h, Codes const& a,
                       std::int32_t* gmem_tile_counter, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  if (desc.num_slots() == 0) return;
  sequence.add("up_projection_fwd", [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.up_projection_fwd({.gmem_x = x.gmem_codes,
                                        .gmem_x_scales = x.gmem_scales,
                                        .gmem_gather_index = gather_index(desc, tables),
                                        .gmem_expert_offsets = tables.expert_offsets,
                                        .gmem_w_up = w_up.gmem_codes,
                                        .gmem_w_up_scales = w_up.gmem_scales,
                                        .activation = desc.activation,
                                        .gmem_h = h.gmem_codes,
                                        .gmem_a = a.gmem_codes,
                                        .gmem_h_scales = h.gmem_scales,
                                        .gmem_a_scales = a.gmem_scales,
                                        .rows = desc.num_slots(),
                                        .hidden = s.hidden,
                                        .intermediate = s.intermediate,
                                        .experts = experts_of(desc),
                                        .gmem_tile_counter = gmem_tile_counter},
                                       sequence.device().sm_count(), stream);
    });
  });
}

}  // namespace

Status check_quantised(Architecture architecture, MoeDesc const& desc,
                       MoeForwardArgs const& args) noexcept {
  TESSERA_TRY(check_multiplies_codes(architecture, desc.precision));
  TESSERA_TRY(check_rows("x", matrix_rows(args.x)));
  TESSERA_TRY(check_saved(desc, args));
  return check_weights(desc, args.weights, args.weight_codes);
}

Status check_quantised(Architecture architecture, MoeDesc const& desc, MoeBackwardArgs const& args,
                       Pass pass) noexcept {
  TESSERA_TRY(check_multiplies_codes(architecture, desc.precision));
  TESSERA_TRY(check_saved(desc, args));
  TESSERA_TRY(check_base("dh", args.dh.data));
  TESSERA_TRY(check_base("a_scaled", args.a_scaled.data));
  if (pass == Pass::backward_weights) return {};
  TESSERA_TRY(check_rows("d_o", matrix_rows(args.d_o)));
  return check_weights(desc, args.weights, args.weight_codes);
}

void add_quantised_projections(MoeDesc const& desc, MoeForwardArgs const& args,
                               ForwardPlan const& plan, std::byte* base, RoutingView const& tables,
                               void* gmem_y, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  MatrixRows const x = matrix_rows(args.x);
  Codes const x8 = args.x8.present() ? codes_of(args.x8, args.x_scale) : codes_of(plan.x8, base);
  Codes const h8 = codes_of(args.h, args.h_scale), a8 = codes_of(plan.a8, base);
  add_quantised_rows("quantise x", desc, x, x8, sequence);
  Codes const w_up =
      forward_up(desc, args.weights, args.weight_codes, codes_of(plan.w_up, base), sequence);
  Codes const w_down =
      forward_down(desc, args.weights, args.weight_codes, codes_of(plan.w_down, base), sequence);
  if (args.h_scale.present()) {  // of rows that no expert has, and of the padding
    sequence.add("h_scale", [&](cudaStream_t stream) {
      std::size_t const bytes =
          dtype_bytes(args.h_scale.dtype) * static_cast<std::size_t>(args.h_scale.elements());
      return bytes == 0 ? cudaSuccess : cudaMemsetAsync(args.h_scale.data, 0, bytes, stream);
    });
  }
  std::int32_t* const gmem_counters = plan.counters.in(base);
  add_up_projection(desc, tables, x8, w_up, h8, a8, gmem_counters + kUpProjectionCounter, sequence);
  if (desc.num_slots() == 0) return;
  sequence.add("down_projection_fwd", [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.down_projection_fwd(
          {.gmem_a = a8.gmem_codes,
           .gmem_a_scales = a8.gmem_scales,
           .gmem_expert_offsets = tables.expert_offsets,
           .gmem_w_down = w_down.gmem_codes,
           .gmem_w_down_scales = w_down.gmem_scales,
           .gmem_y = gmem_y,
           .rows = desc.num_slots(),
           .hidden = s.hidden,
           .intermediate = s.intermediate,
           .experts = experts_of(desc),
           .gmem_tile_counter = gmem_counters + kDownProjectionCounter},
          sequence.device().sm_count(), stream);
    });
  });
}

void add_h8(MoeDesc const& desc, MoeBackwardArgs const& args, BackwardPlan const& plan,
            std::byte* base, RoutingView const& tables, Sequence& sequence) noexcept {
  Codes const w_up =
      forward_up(desc, args.weights, args.weight_codes, codes_of(plan.w_up, base), sequence);
  add_up_projection(desc, tables, codes_of(args.x8, args.x_scale), w_up, codes_of(plan.h8, base),
                    {}, plan.counters.in(base) + kUpProjectionCounter, sequence);
}

void add_quantised_down_dgrad(MoeDesc const& desc, MoeBackwardArgs const& args,
                              BackwardPlan const& plan, std::byte* base,
                              DownProjectionDgradArguments const& like,
                              Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  Codes const d_o = codes_of(plan.d_o8, base), h = h8_of(desc, args, plan, base),
              dh = args.dx.present() ? dh8_of(desc, args, plan, base) : Codes{};
  add_quantised_rows("quantise d_o", desc, like.d_o, d_o, sequence);
  Codes const w_down_t = backward_down(desc, args, codes_of(plan.w_down_t, base), sequence);
  if (like.rows == 0) return;
  sequence.add("down_projection_dgrad", [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.down_projection_dgrad({.gmem_d_o = d_o.gmem_codes,
                                            .gmem_d_o_scales = d_o.gmem_scales,
                                            .gmem_gather_index = like.gmem_gather_index,
                                            .gmem_expert_offsets = like.gmem_expert_offsets,
                                            .gmem_w_down_t = w_down_t.gmem_codes,
                                            .gmem_w_down_t_scales = w_down_t.gmem_scales,
                                            .gmem_scores = like.gmem_scores,
                                            .gmem_sort_permutation = like.gmem_sort_permutation,
                                            .gmem_h = h.gmem_codes,
                                            .gmem_h_scales = h.gmem_scales,
                                            .activation = like.activation,
                                            .gmem_dh = like.gmem_dh,
                                            .gmem_dh8 = dh.gmem_codes,
                                            .gmem_dh8_scales = dh.gmem_scales,
                                            .gmem_a_scaled = like.gmem_a_scaled,
                                            .gmem_ds_partials = like.gmem_ds_partials,
                                            .rows = like.rows,
                                            .hidden = s.hidden,
                                            .intermediate = s.intermediate,
                                            .experts = like.experts,
                                            .gmem_tile_counter = like.gmem_tile_counter},
                                           sequence.device().sm_count(), stream);
    });
  });
}

void add_quantised_up_dgrad(MoeDesc const& desc, MoeBackwardArgs const& args,
                            BackwardPlan const& plan, std::byte* base,
                            UpProjectionDgradArguments const& like, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  Codes const dh = dh8_of(desc, args, plan, base);
  Codes const w_up_t = backward_up(desc, args, codes_of(plan.w_up_t, base), sequence);
  if (like.rows == 0) return;
  sequence.add("up_projection_dgrad", [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.up_projection_dgrad({.gmem_dh = dh.gmem_codes,
                                          .gmem_dh_scales = dh.gmem_scales,
                                          .gmem_expert_offsets = like.gmem_expert_offsets,
                                          .gmem_w_up_t = w_up_t.gmem_codes,
                                          .gmem_w_up_t_scales = w_up_t.gmem_scales,
                                          .gmem_dx_rows = like.gmem_dx_rows,
                                          .rows = like.rows,
                                          .hidden = s.hidden,
                                          .intermediate = s.intermediate,
                                          .experts = like.experts,
                                          .gmem_tile_counter = like.gmem_tile_counter},
                                         sequence.device().sm_count(), stream);
    });
  });
}

Status quantise_weights(DeviceContext const& device, MoeDesc const& desc,
                        ExpertWeights const& weights, QuantisedWeights const& out,
                        Stream stream) noexcept {
  TESSERA_TRY(check_multiplies_codes(device.architecture(), desc.precision));
  TESSERA_TRY(check_weights(desc, weights));
  TESSERA_TRY(check_codes(out));
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  Sequence sequence(device, stream);
  WeightViews const views = weight_views(desc, weights);
  add_quantised_up(desc, views, codes_of(out.up, out.up_scales),
                   codes_of(out.up_transposed, Tensor{}), sequence);
  add_quantised_down(desc, views.w_down, codes_of(out.down, out.down_scales),
                     codes_of(out.down_transposed, Tensor{}), sequence);
  return sequence.status();
}

void add_dequantised_x(MoeDesc const& desc, MoeBackwardArgs const& args, void* gmem_x,
                       Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  Codes const x8 = codes_of(args.x8, args.x_scale);
  sequence.add("dequantise x", [&](cudaStream_t stream) {
    return with_kernels(desc, [&](auto kernels) {
      return kernels.dequantise_rows(x8, s.tokens, s.hidden, gmem_x, stream);
    });
  });
}

}  // namespace tessera::cuda
