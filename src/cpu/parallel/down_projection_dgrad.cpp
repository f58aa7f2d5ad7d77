// SPDX-License-Identifier: Apache-2.0
// dA'_r = dO_t w_down[e],  ds_j = <dA'_r, A_r> + <dO_t, b_down[e]>,  dh_r = J_act(h_r)^T (s_j dA'_r),
// a_scaled_r = s_j A_r;  A is recomputed from h. Nothing of size T*K*d is saved or read.
#include <algorithm>

#include "cpu/parallel/activation.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

/// Scratch of a block: dA' [rows,n], a row of A [n], scores [rows], <dA',A> [rows], then the GEMM's.
struct Scratch {
  float *da_unscaled, *a_row, *scores, *da_dot_a, *gemm;
  Scratch(float* base, std::int64_t n) noexcept
      : da_unscaled(base),
        a_row(da_unscaled + kRowBlock * n),
        scores(a_row + n),
        da_dot_a(scores + kRowBlock),
        gemm(da_dot_a + kRowBlock) {}
};

}  // namespace

std::int64_t down_projection_dgrad_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const n = desc.shape.intermediate;
  return kRowBlock * (n + 2) + n + gemm_scratch_floats(kRowBlock, n, desc.shape.hidden);
}

template <class T>
void down_projection_dgrad(Layer<T> const& layer, DownDgradArgs<T> const& args,
                           Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  RoutingView const& routing = layer.routing;
  // Slots without a row are not reached by any block; their gradient is 0 by definition.
  if (args.dscores != nullptr) std::fill_n(args.dscores, layer.slots(), 0.0f);

  for_each_row_block(layer, threads, [&](RowBlock const& block) {
    auto const& [expert, row, rows, slot, weights] = block;
    Scratch const scratch(threads.scratch(slot), n);
    gemm(rows, n, d, left_operand(args.d_o.matrix(), routing.gather_index + row),
         right_operand(layer.w_down.of(expert)), result(Matrix{scratch.da_unscaled, n, 1}),
         scratch.gemm, weights);
    for (std::int64_t r = 0; r < rows; ++r)
      scratch.scores[r] = routing.scores[routing.sort_permutation[row + r]];
    activation_backward(layer.desc, ActivationBackward<T>{.rows = rows,
                                                          .h = args.h + row * width,
                                                          .da_unscaled = scratch.da_unscaled,
                                                          .scores = scratch.scores,
                                                          .dh = args.dh + row * width,
                                                          .a_scaled = args.a_scaled + row * n,
                                                          .da_dot_a = scratch.da_dot_a,
                                                          .a_row = scratch.a_row});
    if (args.dscores == nullptr) return;
    for (std::int64_t r = 0; r < rows; ++r) {
      float const from_bias =
          layer.b_down.data == nullptr
              ? 0.0f
              : dot(args.d_o[routing.gather_index[row + r]], layer.b_down.of(expert), d);
      args.dscores[routing.sort_permutation[row + r]] = scratch.da_dot_a[r] + from_bias;
    }
  });
}

template void down_projection_dgrad(Layer<float> const&, DownDgradArgs<float> const&,
                                    Threads const&) noexcept;
template void down_projection_dgrad(Layer<Bf16> const&, DownDgradArgs<Bf16> const&,
                                    Threads const&) noexcept;

}  // namespace tessera::cpu
