// SPDX-License-Identifier: Apache-2.0
// router_logits, one thread per logit: l = x . w_router[e] + b_router[e].
#include "dot.cuh"

namespace tessera::cuda {
namespace {

// W: of w_router and b_router.
template <class W>
__global__ void __launch_bounds__(plain::kThreads)
    router_logits_plain(RouterLogitsArguments const p) {
  int64_t const output = plain::output_idx();
  int64_t const token = output / p.experts;
  if (token >= p.x.rows) return;
  int64_t const expert = output % p.experts;
  auto const* const gmem_x = static_cast<__nv_bfloat16 const*>(p.x.gmem) + token * p.x.pitch;
  auto const* const gmem_w = static_cast<W const*>(p.w_router.gmem) + expert * p.w_router.pitch;
  float logit = plain::dot(gmem_x, gmem_w, p.hidden, 1);
  if (p.gmem_b_router != nullptr) {
    logit += plain::widen(static_cast<W const*>(p.gmem_b_router)[expert]);
  }
  p.gmem_logits[output] = logit;
}

}  // namespace

cudaError_t launch_router_logits_plain(RouterLogitsArguments const& args, cudaStream_t stream) {
  int64_t const outputs = args.x.rows * args.experts;
  return args.is_fp32 ? plain::launch(router_logits_plain<float>, outputs, stream, args)
                      : plain::launch(router_logits_plain<__nv_bfloat16>, outputs, stream, args);
}

}  // namespace tessera::cuda
