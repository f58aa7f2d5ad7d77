// SPDX-License-Identifier: Apache-2.0
// concat: gate rows at i, up rows at n+i. up-first: n+i, i. interleaved: 2i, 2i+1. blocked B: 2B*(i/B) + i%B, +B.
#include "cuda/layer/arguments.hpp"

#include <cuda_bf16.h>

#include <algorithm>

#include "cuda/layer/plan.hpp"

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

/// Rows 0, 1, .. of each expert; `row` and `column` are the axes of the tensor (column < 0: none, a bias).
WeightRows rows_of(ConstTensor const& tensor, int row, int column, std::int64_t count) noexcept {
  return {.gmem = tensor.data,
          .expert_stride = stride_of(tensor, 0),
          .row_stride = stride_of(tensor, row),
          .column_stride = column < 0 ? 0 : stride_of(tensor, column),
          .block = count,
          .block_stride = 0};
}

WeightRows from_row(WeightRows rows, std::int64_t first) noexcept {
  if (rows.gmem == nullptr) return rows;
  rows.gmem = static_cast<__nv_bfloat16 const*>(rows.gmem) + first * rows.row_stride;
  return rows;
}

/// Splits rows that hold gate and up in the layout's order; `out`: gate, up.
void split_halves(MoeDesc const& desc, WeightRows const& rows, WeightRows (&out)[2]) noexcept {
  std::int64_t const n = desc.shape.intermediate, block = desc.layout.block;
  out[0] = out[1] = rows;
  if (!desc.activation.gated()) {
    out[1] = {};
    return;
  }
  switch (desc.layout.order) {
    case GateUpOrder::concat:
      out[1] = from_row(rows, n);
      break;
    case GateUpOrder::up_first:
      out[0] = from_row(rows, n);
      break;
    case GateUpOrder::interleaved:
      out[1] = from_row(rows, 1);
      out[0].row_stride = out[1].row_stride = 2 * rows.row_stride;
      break;
    case GateUpOrder::blocked:
      out[1] = from_row(rows, block);
      out[0].block = out[1].block = block;
      out[0].block_stride = out[1].block_stride = 2 * block * rows.row_stride;
      break;
  }
}

ConstTensor without_memory(std::initializer_list<std::int64_t> shape) noexcept {
  return tensor(static_cast<void const*>(nowhere()), DType::bf16, shape);
}

}  // namespace

MatrixRows matrix_rows(ConstTensor const& tensor) noexcept {
  return {tensor.data, tensor.shape[0], stride_of(tensor, 0)};
}

WeightViews weight_views(MoeDesc const& desc, ExpertWeights const& weights) noexcept {
  std::int64_t const n = desc.shape.intermediate, d = desc.shape.hidden;
  WeightViews out;
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  int const row = turned ? 2 : 1, column = turned ? 1 : 2;
  out.w_down = rows_of(weights.w_down, row, column, d);
  if (desc.bias) out.b_down = rows_of(weights.b_down, 1, -1, d);
  if (desc.layout.orientation == WeightOrientation::separate) {
    out.w_up[0] = rows_of(weights.w_gate, 1, 2, n);
    out.w_up[1] = rows_of(weights.w_up, 1, 2, n);
    if (desc.bias) {
      out.b_up[0] = rows_of(weights.b_gate, 1, -1, n);
      out.b_up[1] = rows_of(weights.b_up, 1, -1, n);
    }
    return out;
  }
  split_halves(desc, rows_of(weights.w_up, row, column, n), out.w_up);
  if (desc.bias) split_halves(desc, rows_of(weights.b_up, 1, -1, n), out.b_up);
  return out;
}

ExpertArguments expert_arguments(MoeDesc const& desc, MoeForwardArgs const& args,
                                 ExpertMemory const& memory) noexcept {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots();
  auto const experts = static_cast<std::int32_t>(s.experts);
  WeightViews const views = weight_views(desc, args.weights);
  bool const gathers = desc.grouping == RowGrouping::slots;
  std::int64_t const typical_top_k =
      s.variable_experts ? slots / std::max<std::int64_t>(s.tokens, 1) : s.top_k;
  RoutingView const& tables = memory.tables;
  ExpertArguments out;
  out.up = {.x = matrix_rows(args.x),
            .gmem_gather_index = gathers ? tables.gather_index : nullptr,
            .gmem_expert_offsets = tables.expert_offsets,
            .w_up = {views.w_up[0], views.w_up[1]},
            .b_up = {views.b_up[0], views.b_up[1]},
            .activation = desc.activation,
            .gmem_h = args.h.data,
            .gmem_a = memory.gmem_a,
            .rows = slots,
            .hidden = s.hidden,
            .intermediate = s.intermediate,
            .experts = experts,
            .gmem_tile_counter = memory.gmem_tile_counters + kUpProjectionCounter};
  out.down = {.gmem_a = memory.gmem_a,
              .gmem_expert_offsets = tables.expert_offsets,
              .w_down = views.w_down,
              .b_down = views.b_down,
              .gmem_y = memory.gmem_y,
              .rows = slots,
              .hidden = s.hidden,
              .intermediate = s.intermediate,
              .experts = experts,
              .gmem_tile_counter = memory.gmem_tile_counters + kDownProjectionCounter};
  out.aggregate = {.gmem_y = memory.gmem_y,
                   .gmem_scores = tables.scores,
                   .gmem_inverse_permutation = tables.inverse_permutation,
                   .gmem_token_offsets = tables.token_offsets,
                   .gmem_o = args.o.data,
                   .o_pitch = matrix_rows(args.o).pitch,
                   .adds_to_o = false,
                   .tokens = s.tokens,
                   .hidden = s.hidden,
                   .top_k = static_cast<std::int32_t>(typical_top_k)};
  return out;
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

}  // namespace tessera::cuda
