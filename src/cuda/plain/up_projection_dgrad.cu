// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad, one thread per output: dx row r, column c = rnd(sum over halves and i of
// dh_r,i * w_up[e,i,c] [+ dl_r * w_router[e,c]]).
#include "../host/projection_backward.hpp"
#include "../host/split_fp32.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

__global__ void __launch_bounds__(plain::kThreads)
    up_projection_dgrad_plain(UpProjectionDgradArguments const p) {
  int64_t const n = p.intermediate;
  int64_t const output = plain::output_idx();
  int64_t const row = output / p.hidden;
  if (row >= p.gmem_expert_offsets[p.experts]) return;
  int64_t const column = output % p.hidden;
  int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
  int const halves = p.gated ? 2 : 1;
  auto const* const gmem_dh = static_cast<__nv_bfloat16 const*>(p.gmem_dh) + row * halves * n;
  float sum = 0;
  for (int half = 0; half < halves; ++half) {
    WeightRows const& w = p.w_up[half];
    for (int64_t i = 0; i < n; i += w.block) {  // rows of one block have one stride
      sum =
          plain::dot(gmem_dh + half * n + i, plain::row_of(w, expert, i) + column * w.column_stride,
                     min(w.block, n - i), w.row_stride, sum);
    }
  }
  if (p.gmem_row_dlogits != nullptr) {
    auto const* const gmem_w = static_cast<__nv_bfloat16 const*>(p.w_router.gmem);
    int64_t const first = expert * (p.router_in_terms ? kDgradTerms : 1);
    for (int64_t term = 0; term < (p.router_in_terms ? 2 : 1); ++term) {
      float const w = __bfloat162float(gmem_w[(first + term) * p.w_router.pitch + column]);
      sum = fmaf(p.gmem_row_dlogits[row], w, sum);
    }
  }
  plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_dx_rows)[output], sum);
}

}  // namespace

cudaError_t launch_up_projection_dgrad_plain(UpProjectionDgradArguments const& args,
                                             cudaStream_t stream) {
  return plain::launch(up_projection_dgrad_plain, args.rows * args.hidden, stream, args);
}

}  // namespace tessera::cuda
