// SPDX-License-Identifier: Apache-2.0
// down_projection_wgrad and up_projection_wgrad, one thread per output: dw[half][e](i, c) =
// sum over rows r of e, ascending, of right[r, half*n + i] * left[gather_index[r], c].
#include "../host/projection_backward.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

template <class Gradient>
__global__ void __launch_bounds__(plain::kThreads) wgrad_plain(WgradArguments const p) {
  int64_t const n = p.intermediate, d = p.hidden;
  int64_t const output = plain::output_idx();
  int64_t const column = output % d, i = output / d % n;
  int64_t const half = output / d / n % p.halves, expert = output / d / n / p.halves;
  if (expert >= p.experts || p.dw[half].gmem == nullptr) return;
  int64_t const first = p.gmem_expert_offsets[expert], end = p.gmem_expert_offsets[expert + 1];
  if (p.accumulates && first == end) return;
  auto const* const gmem_left = static_cast<__nv_bfloat16 const*>(p.left.gmem) + column;
  auto const* const gmem_right = static_cast<__nv_bfloat16 const*>(p.gmem_right) + half * n + i;
  float sum = 0;
  for (int64_t row = first; row < end; ++row) {
    int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
    sum = fmaf(plain::widen(gmem_right[row * p.halves * n]),
               plain::widen(gmem_left[source * p.left.pitch]), sum);
  }
  WeightRows const& dw = p.dw[half];
  auto* const gmem_dw = static_cast<Gradient*>(const_cast<void*>(dw.gmem));
  plain::store_gradient(gmem_dw[dw.row_offset(expert, i) + column * dw.column_stride], sum,
                        p.accumulates);
}

}  // namespace

cudaError_t launch_wgrad_plain(WgradArguments const& args, cudaStream_t stream) {
  int64_t const outputs = args.experts * args.halves * args.intermediate * args.hidden;
  return args.is_fp32 ? plain::launch(wgrad_plain<float>, outputs, stream, args)
                      : plain::launch(wgrad_plain<__nv_bfloat16>, outputs, stream, args);
}

}  // namespace tessera::cuda
