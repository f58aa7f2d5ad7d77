// SPDX-License-Identifier: Apache-2.0
// ds_j = sum of the partials of slot j's row, in order, + <dO_t, b_down[e]>; 0 at sentinels.
#include "../host/router_backward.hpp"
#include "dot.cuh"
#include "warp.cuh"

namespace tessera::cuda {
namespace {

// kLanes threads per slot: 1, or with a bias a warp, whose lanes share the dot product.
template <int kLanes>
__global__ void __launch_bounds__(plain::kThreads) dscores_plain(DscoresArguments const p) {
  int64_t const slot = plain::output_idx() / kLanes;
  int const lane = int(threadIdx.x) % kLanes;
  if (slot >= p.slots) return;
  int64_t const row = p.gmem_inverse_permutation[slot];
  if (row < 0) {
    if (lane == 0) p.gmem_dscores[slot] = 0;
    return;
  }
  float ds = 0;
  for (int64_t group = 0; group < p.groups; ++group) {
    ds += p.gmem_ds_partials[row * p.groups + group];
  }
  if constexpr (kLanes > 1) {
    int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
    int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
    auto const* const gmem_d_o =
        static_cast<__nv_bfloat16 const*>(p.d_o.gmem) + source * p.d_o.pitch;
    float partial = 0;
    for (int64_t begin = lane * kBiasVector; begin < p.hidden; begin += kLanes * kBiasVector) {
      for (int64_t c = begin; c < min(begin + kBiasVector, p.hidden); ++c) {
        partial = fmaf(plain::widen(gmem_d_o[c]), plain::bias_of(p.b_down, expert, c), partial);
      }
    }
    ds += plain::warp_sum(partial);
  }
  if (lane == 0) p.gmem_dscores[slot] = ds;
}

}  // namespace

cudaError_t launch_dscores_plain(DscoresArguments const& args, cudaStream_t stream) {
  return args.b_down.gmem == nullptr ? plain::launch(dscores_plain<1>, args.slots, stream, args)
                                     : plain::launch(dscores_plain<plain::kLanes>,
                                                     args.slots * plain::kLanes, stream, args);
}

}  // namespace tessera::cuda
