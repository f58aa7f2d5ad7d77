// SPDX-License-Identifier: Apache-2.0
// dA'_r = dO_t w_down[e],  ds_j = <dA'_r, A_r> + <dO_t, b_down[e]>,  dh_r = J_act(h_r)^T (s_j dA'_r),
// a_scaled_r = s_j A_r;  A is recomputed from h. Nothing of size T*K*d is kept or read.
#include <algorithm>

#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {

// Scratch of a block: gathered dO [rows,d], dA' [rows,n], scores [rows], <dA',A> [rows].
std::int64_t down_projection_dgrad_scratch(MoeDesc const& desc) noexcept {
  return kRowBlock * (desc.shape.hidden + desc.shape.intermediate + 2);
}

void down_projection_dgrad(Layer const& layer, DownDgradArgs const& args,
                           Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  RoutingView const& routing = layer.routing;
  // Slots without a row are not reached by any block; their gradient is 0 by definition.
  if (args.dscores != nullptr) std::fill_n(args.dscores, layer.slots(), 0.0f);

  for_each_row_block(
      layer, threads, [&](std::int64_t expert, std::int64_t row, std::int64_t rows, int slot) {
        float* const gathered = threads.scratch(slot);
        float* const da_unscaled = gathered + kRowBlock * d;
        float* const scores = da_unscaled + kRowBlock * n;
        float* const da_dot_a = scores + kRowBlock;
        gather_rows(args.d_o, routing.gather_index, row, rows, 0, d, gathered);
        gemm(rows, n, d, {gathered, d, 1}, layer.w_down.of(expert), 0.0f, {da_unscaled, n, 1});
        for (std::int64_t r = 0; r < rows; ++r)
          scores[r] = routing.scores[routing.sort_permutation[row + r]];
        activation_backward(layer.desc, {.rows = rows,
                                         .h = args.h + row * width,
                                         .da_unscaled = da_unscaled,
                                         .scores = scores,
                                         .dh = args.dh + row * width,
                                         .a_scaled = args.a_scaled + row * n,
                                         .da_dot_a = da_dot_a});
        if (args.dscores == nullptr) return;
        float const* const bias = layer.b_down.data == nullptr
                                      ? nullptr
                                      : layer.b_down.data + expert * layer.b_down.expert_stride;
        for (std::int64_t r = 0; r < rows; ++r) {
          float const from_bias = bias == nullptr ? 0.0f : dot(gathered + r * d, bias, d);
          args.dscores[routing.sort_permutation[row + r]] = da_dot_a[r] + from_bias;
        }
      });
}

}  // namespace tessera::cpu
