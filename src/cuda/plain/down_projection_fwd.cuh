// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd, one thread per output: y_rc = rnd(a_r . w_down[e,c] + b_down[e,c]).
#pragma once

#include "dot.cuh"

namespace tessera::cuda {

// A: element of a; dot() decodes it.
template <class A>
__global__ void __launch_bounds__(plain::kThreads)
    down_projection_fwd_plain(DownProjectionFwdArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t const row = output / p.hidden;
  if (row >= p.gmem_expert_offsets[p.experts]) return;
  int64_t const column = output % p.hidden;
  int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
  auto const* const gmem_a = static_cast<A const*>(p.gmem_a) + row * p.intermediate;
  float const sum = plain::dot(gmem_a, plain::row_of(p.w_down, expert, column), p.intermediate,
                               p.w_down.column_stride);
  plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_y)[output],
                  sum + plain::bias_of(p.b_down, expert, column));
}

}  // namespace tessera::cuda
