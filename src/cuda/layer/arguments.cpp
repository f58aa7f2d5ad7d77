// SPDX-License-Identifier: Apache-2.0
// Gate row i and up row i of w_up: concat i, n+i; up-first n+i, i; interleaved 2i, 2i+1; blocked 2B*(i/B) + i%B, +B.
#include "cuda/layer/arguments.hpp"

#include <algorithm>

#include "core/gathered_rows.hpp"
#include "core/gradient_dtype.hpp"
#include "core/interleaved_columns.hpp"

namespace tessera::cuda {
namespace {

/// Strides of a checked tensor; where an extent is 1 its stride may hold anything, so it is replaced.
std::int64_t stride_of(ConstTensor const& tensor, int axis) noexcept {
  if (tensor.shape[axis] > 1) return tensor.stride[axis];
  std::int64_t inner = 1;
  for (int later = tensor.rank - 1; later > axis; --later) {
    inner = tensor.shape[later] > 1 ? tensor.stride[later] * tensor.shape[later] : inner;
  }
  return inner;
}

void const* bf16_at(void const* gmem, std::int64_t element) noexcept {
  return static_cast<std::uint16_t const*>(gmem) + element;
}

WeightRows from_row(WeightRows rows, std::int64_t first, DType dtype) noexcept {
  if (rows.gmem == nullptr) return rows;
  rows.gmem = static_cast<std::byte const*>(rows.gmem) +
              first * rows.row_stride * static_cast<std::int64_t>(dtype_bytes(dtype));
  return rows;
}

/// Splits the rows of a tensor that holds gate and up in the layout's order; `out`: gate, up.
void split_halves(MoeDesc const& desc, ConstTensor const& tensor, int row, int column,
                  WeightRows (&out)[2]) noexcept {
  std::int64_t const n = desc.shape.intermediate, block = desc.layout.block;
  WeightRows const rows = weight_rows(tensor, row, column, n);
  out[0] = out[1] = rows;
  if (!desc.activation.gated()) {
    out[1] = {};
    return;
  }
  switch (desc.layout.order) {
    case GateUpOrder::concat:
      out[1] = from_row(rows, n, tensor.dtype);
      break;
    case GateUpOrder::up_first:
      out[0] = from_row(rows, n, tensor.dtype);
      break;
    case GateUpOrder::interleaved:
      out[1] = from_row(rows, 1, tensor.dtype);
      out[0].row_stride = out[1].row_stride = 2 * rows.row_stride;
      break;
    case GateUpOrder::blocked:
      out[1] = from_row(rows, block, tensor.dtype);
      out[0].block = out[1].block = block;
      out[0].block_stride = out[1].block_stride = 2 * block * rows.row_stride;
      break;
  }
}

/// Views the gate and up rows of w_up and b_up, or of their gradients.
void view_up(MoeDesc const& desc, ExpertWeights const& weights, WeightRows (&up)[2],
             WeightRows (&up_bias)[2]) noexcept {
  std::int64_t const n = desc.shape.intermediate;
  if (desc.layout.orientation == WeightOrientation::separate) {
    up[0] = weight_rows(weights.w_gate, 1, 2, n);
    up[1] = weight_rows(weights.w_up, 1, 2, n);
    if (!desc.bias) return;
    up_bias[0] = weight_rows(weights.b_gate, 1, -1, n);
    up_bias[1] = weight_rows(weights.b_up, 1, -1, n);
    return;
  }
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  split_halves(desc, weights.w_up, turned ? 2 : 1, turned ? 1 : 2, up);
  if (desc.bias) split_halves(desc, weights.b_up, 1, -1, up_bias);
}

std::int32_t const* gather_index(MoeDesc const& desc, RoutingView const& tables) noexcept {
  bool const gathers = desc.grouping == RowGrouping::slots || core::gathers_grouped_rows(desc);
  return gathers ? tables.gather_index : nullptr;
}

UpProjectionFwdArguments up_projection_fwd_of(MoeDesc const& desc, ConstTensor const& x,
                                              WeightViews const& views, RoutingView const& tables,
                                              void* gmem_h, void* gmem_a,
                                              std::int32_t* gmem_tile_counters) noexcept {
  return {.x = matrix_rows(x),
          .gmem_gather_index = gather_index(desc, tables),
          .gmem_expert_offsets = tables.expert_offsets,
          .w_up = {views.w_up[0], views.w_up[1]},
          .b_up = {views.b_up[0], views.b_up[1]},
          .interleaved = core::interleaves_columns(desc),
          .activation = desc.activation,
          .gmem_h = gmem_h,
          .gmem_a = gmem_a,
          .rows = desc.num_slots(),
          .hidden = desc.shape.hidden,
          .intermediate = desc.shape.intermediate,
          .experts = static_cast<std::int32_t>(desc.shape.experts),
          .gmem_tile_counter = gmem_tile_counters + kUpProjectionCounter};
}

AggregateArguments aggregate_of(MoeDesc const& desc, RoutingView const& tables, void const* gmem_y,
                                float const* gmem_scores, Tensor const& o) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const typical_top_k = s.variable_experts && desc.grouping == RowGrouping::slots
                                         ? desc.num_slots() / std::max<std::int64_t>(s.tokens, 1)
                                         : s.top_k;
  return {.gmem_y = gmem_y,
          .gmem_scores = gmem_scores,
          .gmem_inverse_permutation = tables.inverse_permutation,
          .gmem_token_offsets = tables.token_offsets,
          .gmem_o = o.data,
          .o_pitch = matrix_rows(o).pitch,
          .adds_to_o = false,
          .tokens = core::dx_rows(desc),
          .hidden = s.hidden,
          .top_k = static_cast<std::int32_t>(typical_top_k)};
}

/// Columns of gate and up in turn: what reads dh sees one matrix of 2n rows in w_up, b_up and their gradients.
void join_halves(BackwardArguments& args) noexcept {
  args.up_dgrad.w_up[0] = joined(args.up_dgrad.w_up);
  args.up_dgrad.w_up[1] = {};
  args.up_dgrad.gated = false;
  args.up_dgrad.intermediate *= 2;
  args.up_wgrad.dw[0] = joined(args.up_wgrad.dw);
  args.up_wgrad.dw[1] = {};
  args.up_wgrad.halves = 1;
  args.up_wgrad.intermediate *= 2;
  args.db_up.db[0] = joined(args.db_up.db);
  args.db_up.db[1] = {};
  args.db_up.halves = 1;
  args.db_up.columns *= 2;
}

struct Halves {
  WeightRows dw[2];
};
WgradArguments wgrad_of(MoeDesc const& desc, MoeBackwardArgs const& args, RoutingView const& tables,
                        MatrixRows const& left, void const* gmem_right, int halves,
                        Halves const& gradients, std::int32_t* gmem_tile_counter) noexcept {
  return {.left = left,
          .gmem_gather_index = gather_index(desc, tables),
          .gmem_expert_offsets = tables.expert_offsets,
          .gmem_right = gmem_right,
          .halves = halves,
          .dw = {gradients.dw[0], gradients.dw[1]},
          .is_fp32 = core::gradient_dtype(desc, args.gradients) == DType::fp32,
          .accumulates = args.gradients.mode == GradientMode::accumulate,
          .rows = desc.num_slots(),
          .hidden = desc.shape.hidden,
          .intermediate = desc.shape.intermediate,
          .experts = static_cast<std::int32_t>(desc.shape.experts),
          .gmem_tile_counter = gmem_tile_counter};
}

ConstTensor without_memory(std::initializer_list<std::int64_t> shape) noexcept {
  return tensor(static_cast<void const*>(nowhere()), DType::bf16, shape);
}

}  // namespace

MatrixRows matrix_rows(ConstTensor const& tensor) noexcept {
  return {tensor.data, tensor.shape[0], stride_of(tensor, 0)};
}

WeightRows weight_rows(ConstTensor const& tensor, int row, int column,
                       std::int64_t count) noexcept {
  return {.gmem = tensor.data,
          .expert_stride = stride_of(tensor, 0),
          .row_stride = stride_of(tensor, row),
          .column_stride = column < 0 ? 0 : stride_of(tensor, column),
          .block = count,
          .block_stride = 0};
}

WeightViews weight_views(MoeDesc const& desc, ExpertWeights const& weights) noexcept {
  WeightViews out;
  view_up(desc, weights, out.w_up, out.b_up);
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  std::int64_t const d = desc.shape.hidden;
  out.w_down = weight_rows(weights.w_down, turned ? 2 : 1, turned ? 1 : 2, d);
  if (desc.bias) out.b_down = weight_rows(weights.b_down, 1, -1, d);
  return out;
}

GradientViews gradient_views(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  GradientViews out;
  view_up(desc,
          {.w_up = gradients.dw_up,
           .w_gate = gradients.dw_gate,
           .b_up = gradients.db_up,
           .b_gate = gradients.db_gate},
          out.dw_up, out.db_up);
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  out.dw_down =
      weight_rows(gradients.dw_down, turned ? 1 : 2, turned ? 2 : 1, desc.shape.intermediate);
  if (desc.bias) out.db_down = weight_rows(gradients.db_down, 1, -1, desc.shape.hidden);
  return out;
}

bool rows_lie_in(MoeDesc const& desc, Tensor const& out) noexcept {
  constexpr std::uintptr_t kAligned = 16;
  return desc.grouping != RowGrouping::slots && matrix_rows(out).pitch == desc.shape.hidden &&
         reinterpret_cast<std::uintptr_t>(out.data) % kAligned == 0;
}

ExpertArguments expert_arguments(MoeDesc const& desc, MoeForwardArgs const& args,
                                 ExpertMemory const& memory) noexcept {
  MoeShape const& s = desc.shape;
  WeightViews const views = weight_views(desc, args.weights);
  return {
      .up = up_projection_fwd_of(desc, args.x, views, memory.tables, args.h.data, memory.gmem_a,
                                 memory.gmem_tile_counters),
      .down = {.gmem_a = memory.gmem_a,
               .gmem_expert_offsets = memory.tables.expert_offsets,
               .w_down = views.w_down,
               .b_down = views.b_down,
               .gmem_y = memory.gmem_y,
               .rows = desc.num_slots(),
               .hidden = s.hidden,
               .intermediate = s.intermediate,
               .experts = static_cast<std::int32_t>(s.experts),
               .gmem_tile_counter = memory.gmem_tile_counters + kDownProjectionCounter},
      .aggregate = aggregate_of(desc, memory.tables, memory.gmem_y, memory.tables.scores, args.o)};
}

BackwardArguments backward_arguments(MoeDesc const& desc, MoeBackwardArgs const& args,
                                     BackwardMemory const& memory) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots(), n = s.intermediate;
  auto const experts = static_cast<std::int32_t>(s.experts);
  RoutingView const& tables = memory.tables;
  std::int32_t const* const gather = gather_index(desc, tables);
  std::int32_t* const counters = memory.gmem_tile_counters;
  WeightViews const views = weight_views(desc, args.weights);
  GradientViews const gradients = gradient_views(desc, args.gradients);
  bool const is_fp32 = core::gradient_dtype(desc, args.gradients) == DType::fp32;
  bool const accumulates = args.gradients.mode == GradientMode::accumulate;
  int const halves = static_cast<int>(desc.up_width());
  BackwardArguments out;
  out.recompute = up_projection_fwd_of(desc, args.x, views, tables, memory.gmem_recomputed_h,
                                       nullptr, counters);
  out.down_dgrad = {
      .d_o = matrix_rows(args.d_o),
      .gmem_gather_index = gather,
      .gmem_expert_offsets = tables.expert_offsets,
      .w_down = views.w_down,
      .gmem_scores = tables.scores,
      .gmem_sort_permutation = tables.sort_permutation,
      .gmem_h = memory.gmem_recomputed_h != nullptr ? memory.gmem_recomputed_h : args.h.data,
      .interleaved = core::interleaves_columns(desc),
      .activation = desc.activation,
      .gmem_dh = memory.gmem_dh,
      .gmem_a_scaled = memory.gmem_a_scaled,
      .gmem_ds_partials = memory.gmem_ds_partials,
      .rows = slots,
      .hidden = s.hidden,
      .intermediate = n,
      .experts = experts,
      .gmem_tile_counter = counters + kDownProjectionDgradCounter};
  out.down_wgrad = {wgrad_of(desc, args, tables, matrix_rows(args.d_o), memory.gmem_a_scaled, 1,
                             {{gradients.dw_down}}, counters + kDownProjectionWgradCounter)};
  out.up_dgrad = {.gmem_dh = memory.gmem_dh,
                  .gmem_expert_offsets = tables.expert_offsets,
                  .w_up = {views.w_up[0], views.w_up[1]},
                  .gated = desc.activation.gated(),
                  .gmem_dx_rows = memory.gmem_dx_rows,
                  .rows = slots,
                  .hidden = s.hidden,
                  .intermediate = n,
                  .experts = experts,
                  .gmem_tile_counter = counters + kUpProjectionDgradCounter};
  out.aggregate = aggregate_of(desc, tables, memory.gmem_dx_rows, nullptr, args.dx);
  out.aggregate.adds_to_o = desc.router.kind != RouterKind::given;
  out.up_wgrad = {wgrad_of(desc, args, tables, matrix_rows(args.x), memory.gmem_dh, halves,
                           {{gradients.dw_up[0], gradients.dw_up[1]}},
                           counters + kUpProjectionWgradCounter)};
  out.db_down = {.left = matrix_rows(args.d_o),
                 .left_is_fp32 = false,
                 .gmem_gather_index = gather,
                 .gmem_expert_offsets = tables.expert_offsets,
                 .gmem_scores = tables.scores,
                 .gmem_sort_permutation = tables.sort_permutation,
                 .halves = 1,
                 .db = {gradients.db_down},
                 .is_fp32 = is_fp32,
                 .accumulates = accumulates,
                 .columns = s.hidden,
                 .experts = experts};
  out.db_up = {.left = {memory.gmem_dh, slots, halves * n},
               .left_is_fp32 = false,
               .gmem_gather_index = nullptr,
               .gmem_expert_offsets = tables.expert_offsets,
               .gmem_scores = nullptr,
               .gmem_sort_permutation = nullptr,
               .halves = halves,
               .db = {gradients.db_up[0], gradients.db_up[1]},
               .is_fp32 = is_fp32,
               .accumulates = accumulates,
               .columns = n,
               .experts = experts};
  if (core::interleaves_columns(desc)) join_halves(out);
  return out;
}

DownProjectionFwdArguments columns_of(DownProjectionFwdArguments args, Columns columns) noexcept {
  args.w_down = from_row(args.w_down, columns.first, DType::bf16);
  args.b_down = from_row(args.b_down, columns.first, DType::bf16);
  args.hidden = columns.count;
  return args;
}

UpProjectionDgradArguments columns_of(UpProjectionDgradArguments args, Columns columns) noexcept {
  for (WeightRows& w : args.w_up) {
    if (w.gmem != nullptr) w.gmem = bf16_at(w.gmem, columns.first * w.column_stride);
  }
  if (args.w_router.gmem != nullptr) {
    args.w_router.gmem = bf16_at(args.w_router.gmem, columns.first);
  }
  args.hidden = columns.count;
  return args;
}

AggregateArguments columns_of(AggregateArguments args, Columns columns) noexcept {
  args.gmem_o = const_cast<void*>(bf16_at(args.gmem_o, columns.first));
  args.hidden = columns.count;
  return args;
}

ExpertsFwdArguments experts_fwd_arguments(ExpertArguments const& experts, bool in_place,
                                          std::int32_t* gmem_counters) noexcept {
  return {.up = experts.up,
          .down = experts.down,
          .aggregate = in_place ? AggregateArguments{} : experts.aggregate,
          .has_aggregate = !in_place,
          .gmem_ticket = gmem_counters + kUpProjectionCounter};
}

ExpertWeights weights_without_memory(MoeDesc const& desc) noexcept {
  std::int64_t const e = desc.shape.experts, n = desc.shape.intermediate, d = desc.shape.hidden;
  std::int64_t const width = desc.up_width() * n;
  ExpertWeights out;
  switch (desc.layout.orientation) {
    case WeightOrientation::rows:
      out.w_up = without_memory({e, width, d});
      out.w_down = without_memory({e, d, n});
      break;
    case WeightOrientation::transposed:
      out.w_up = without_memory({e, d, width});
      out.w_down = without_memory({e, n, d});
      break;
    case WeightOrientation::separate:
      out.w_up = out.w_gate = without_memory({e, n, d});
      out.w_down = without_memory({e, d, n});
      break;
  }
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  out.b_up = without_memory({e, separate ? n : width});
  if (separate) out.b_gate = out.b_up;
  out.b_down = without_memory({e, d});
  return out;
}

ExpertGradients gradients_without_memory(MoeDesc const& desc) noexcept {
  ExpertWeights const like = weights_without_memory(desc);
  auto const writable = [](ConstTensor const& weight) {
    Tensor out = tensor(nowhere(), weight.dtype, {});
    out.rank = weight.rank;
    std::copy_n(weight.shape, kMaxRank, out.shape);
    std::copy_n(weight.stride, kMaxRank, out.stride);
    return out;
  };
  return {.dw_up = writable(like.w_up),
          .dw_gate = writable(like.w_gate),
          .dw_down = writable(like.w_down),
          .db_up = writable(like.b_up),
          .db_gate = writable(like.b_gate),
          .db_down = writable(like.b_down)};
}

}  // namespace tessera::cuda
