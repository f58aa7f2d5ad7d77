// SPDX-License-Identifier: Apache-2.0
// router_wgrad, one thread per output: dw_router[e,c] = sum over real tokens t, ascending, of dl[t,e] * x[t,c], term by
// term of dl.
#include "../host/router_backward.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

template <class Gradient>
__global__ void __launch_bounds__(plain::kThreads)
    router_wgrad_plain(RouterWgradArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t const expert = output / p.hidden, column = output % p.hidden;
  int64_t const tokens = p.gmem_order == nullptr
                             ? p.x.rows
                             : p.gmem_chunk_offsets[router_wgrad_most_chunks(
                                   p.x.rows, p.hidden, int64_t{p.experts} * p.terms)];
  if (expert >= p.experts || (p.accumulates && tokens == 0)) return;
  auto const* const gmem_dl = static_cast<__nv_bfloat16 const*>(p.gmem_dlogits) + expert;
  auto const* const gmem_x = static_cast<__nv_bfloat16 const*>(p.x.gmem) + column;
  float sum = 0;
  for (int term = 0; term < p.terms; ++term) {
    for (int64_t i = 0; i < tokens; ++i) {
      int64_t const t = p.gmem_order == nullptr ? i : p.gmem_order[i];
      sum = fmaf(plain::widen(gmem_dl[(i * p.terms + term) * p.experts]),
                 plain::widen(gmem_x[t * p.x.pitch]), sum);
    }
  }
  plain::store_gradient(static_cast<Gradient*>(p.gmem_dw_router)[expert * p.dw_pitch + column], sum,
                        p.accumulates);
}

}  // namespace

cudaError_t launch_router_wgrad_plain(RouterWgradArguments const& args, cudaStream_t stream) {
  int64_t const outputs = args.experts * args.hidden;
  return args.is_fp32 ? plain::launch(router_wgrad_plain<float>, outputs, stream, args)
                      : plain::launch(router_wgrad_plain<__nv_bfloat16>, outputs, stream, args);
}

}  // namespace tessera::cuda
