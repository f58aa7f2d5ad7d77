// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels from the tensors of a call.
#pragma once

#include <cstdint>

#include "cuda/host/aggregate.hpp"
#include "cuda/host/bias_gradient.hpp"
#include "cuda/host/experts_fwd.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/layer/plan.hpp"
#include "tessera/moe.hpp"

namespace tessera::cuda {

/// A checked [rows,columns] tensor.
MatrixRows matrix_rows(ConstTensor const& tensor) noexcept;

/// Rows 0, 1, .. `count` of each expert of a checked tensor [E,..]; `row` and `column` are the axes of the tensor
/// (column < 0: none, a bias).
WeightRows weight_rows(ConstTensor const& tensor, int row, int column, std::int64_t count) noexcept;

/// Gate and up rows of w_up (one matrix where not gated) and of its biases; rows of w_down and b_down.
struct WeightViews {
  WeightRows w_up[2], b_up[2], w_down, b_down;
};
WeightViews weight_views(MoeDesc const& desc, ExpertWeights const& weights) noexcept;

/// Their gradients, of the dtype of core::gradient_dtype; absent: gmem null. dw_down as n rows of d.
struct GradientViews {
  WeightRows dw_up[2], db_up[2], dw_down, db_down;
};
GradientViews gradient_views(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;

/// Arguments of the experts' kernels of one forward call.
struct ExpertMemory {
  RoutingView tables;
  void* gmem_a;                 ///< [P,n]
  void* gmem_y;                 ///< [P,d]
  int32_t* gmem_tile_counters;  ///< [kNumTileCounters], zero
};
struct ExpertArguments {
  UpProjectionFwdArguments up;
  DownProjectionFwdArguments down;
  AggregateArguments aggregate;
};
ExpertArguments expert_arguments(MoeDesc const& desc, MoeForwardArgs const& args,
                                 ExpertMemory const& memory) noexcept;

/// Arguments of the experts' kernels of one backward call. What is not wanted is null.
struct BackwardMemory {
  RoutingView tables;
  void* gmem_recomputed_h;      ///< [P,w*n], null: args.h holds it
  void* gmem_dh;                ///< [P,w*n]
  void* gmem_a_scaled;          ///< [P,n]
  float* gmem_ds_partials;      ///< [P,score_groups(n)]
  void* gmem_dx_rows;           ///< [P,d]
  int32_t* gmem_tile_counters;  ///< [kNumTileCounters], zero
};
struct BackwardArguments {
  UpProjectionFwdArguments recompute;
  DownProjectionDgradArguments down_dgrad;
  DownProjectionWgradArguments down_wgrad;
  UpProjectionDgradArguments up_dgrad;
  AggregateArguments aggregate;
  UpProjectionWgradArguments up_wgrad;
  BiasGradientArguments db_down, db_up;
};
BackwardArguments backward_arguments(MoeDesc const& desc, MoeBackwardArgs const& args,
                                     BackwardMemory const& memory) noexcept;

/// Arguments for some columns alone of y and o, or of dx rows and dx; y and dx rows then hold these columns.
DownProjectionFwdArguments columns_of(DownProjectionFwdArguments args, Columns columns) noexcept;
UpProjectionDgradArguments columns_of(UpProjectionDgradArguments args, Columns columns) noexcept;
AggregateArguments columns_of(AggregateArguments args, Columns columns) noexcept;

/// Arguments of the experts in one launch. In place: rows of y are rows of o.
ExpertsFwdArguments experts_fwd_arguments(ExpertArguments const& experts, bool in_place,
                                          std::int32_t* gmem_counters) noexcept;

/// True if the experts may write their rows to `out` itself: rows are grouped, so each is a row of `out`, and its
/// addresses suit the kernels.
bool rows_lie_in(MoeDesc const& desc, Tensor const& out) noexcept;

/// An aligned address that is never read: it stands for the memory of a call that is only asked about.
inline void* nowhere() noexcept { return reinterpret_cast<void*>(std::uintptr_t{1} << 20); }

/// Contiguous weights of the desc's shapes at nowhere(), and their gradients.
ExpertWeights weights_without_memory(MoeDesc const& desc) noexcept;
ExpertGradients gradients_without_memory(MoeDesc const& desc) noexcept;

}  // namespace tessera::cuda
