// SPDX-License-Identifier: Apache-2.0
// router_wgrad, one thread per output: dw_router[e,c] = sum of the partials of the segments of tokens, in order.
// token_offsets: where the segments start.
#include "../host/router_backward.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

template <class Gradient>
__global__ void __launch_bounds__(plain::kThreads)
    router_wgrad_plain(RouterWgradArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t const expert = output / p.hidden, column = output % p.hidden;
  if (expert >= p.experts || (p.accumulates && p.tokens == 0)) return;
  float sum = 0;
  for (int64_t segment = 0; segment < p.segments; ++segment) {
    sum += p.gmem_partials[segment * p.experts * p.hidden + output];
  }
  plain::store_gradient(static_cast<Gradient*>(p.gmem_dw_router)[expert * p.dw_pitch + column], sum,
                        p.accumulates);
}

__global__ void __launch_bounds__(plain::kThreads)
    token_offsets_plain(TokenOffsetsArguments const p) {
  int64_t const i = plain::output_idx();
  if (i < 2) p.gmem_all[i] = static_cast<int32_t>(i * p.tokens);
  if (i <= p.segments.count) {
    p.gmem_offsets[i] = static_cast<int32_t>(min(i * p.segments.each, p.tokens));
  }
}

}  // namespace

cudaError_t launch_token_offsets_plain(TokenOffsetsArguments const& args, cudaStream_t stream) {
  return plain::launch(token_offsets_plain, args.segments.count + 1, stream, args);
}

cudaError_t launch_router_wgrad_plain(RouterWgradArguments const& args, cudaStream_t stream) {
  int64_t const outputs = args.experts * args.hidden;
  return args.is_fp32 ? plain::launch(router_wgrad_plain<float>, outputs, stream, args)
                      : plain::launch(router_wgrad_plain<__nv_bfloat16>, outputs, stream, args);
}

}  // namespace tessera::cuda
