// SPDX-License-Identifier: Apache-2.0
// router_dgrad, one thread per output of all tokens or of those that are listed: dx[t,c] = rnd(sum over e of dl[t,e] *
// w_router[e,c]).
#include "../host/router_backward.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

__global__ void __launch_bounds__(plain::kThreads)
    router_dgrad_plain(RouterDgradArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t token = output / p.hidden;
  int64_t const column = output % p.hidden;
  if (p.gmem_tokens != nullptr) {
    if (token >= p.gmem_offsets[1]) return;
    token = p.gmem_tokens[token];
  }
  if (token >= p.tokens) return;
  int64_t const products = int64_t{p.experts} * p.terms;
  auto const* const gmem_dl = static_cast<__nv_bfloat16 const*>(p.gmem_dlogits) + token * products;
  auto const* const gmem_w = static_cast<__nv_bfloat16 const*>(p.w_router.gmem) + column;
  plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_dx)[token * p.dx_pitch + column],
                  plain::dot(gmem_dl, gmem_w, products, p.w_router.pitch));
}

}  // namespace

cudaError_t launch_router_dgrad_plain(RouterDgradArguments const& args, cudaStream_t stream) {
  return plain::launch(router_dgrad_plain, args.tokens * args.hidden, stream, args);
}

}  // namespace tessera::cuda
