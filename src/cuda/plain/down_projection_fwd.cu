// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd, one thread per output: y_rc = rnd(a_r . w_down[e,c] + b_down[e,c]).
#include "dot.cuh"

namespace tessera::cuda {
namespace {

__global__ void __launch_bounds__(plain::kThreads)
    down_projection_fwd_plain(DownProjectionFwdArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t const row = output / p.hidden;
  if (row >= p.gmem_expert_offsets[p.experts]) return;
  int64_t const column = output % p.hidden;
  int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
  auto const* const gmem_a = static_cast<__nv_bfloat16 const*>(p.gmem_a) + row * p.intermediate;
  float const sum = plain::dot(gmem_a, plain::row_of(p.w_down, expert, column), p.intermediate,
                               p.w_down.column_stride);
  plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_y)[output],
                  sum + plain::bias_of(p.b_down, expert, column));
}

}  // namespace

cudaError_t launch_down_projection_fwd_plain(DownProjectionFwdArguments const& args,
                                             cudaStream_t stream) {
  return plain::launch(down_projection_fwd_plain, args.rows * args.hidden, stream, args);
}

}  // namespace tessera::cuda
