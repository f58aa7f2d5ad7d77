// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd, one thread per pair (g, u) of one row:
//   g = x . w_gate[e,i] + b_gate[e,i], u alike, h_r = rnd(g, u), a_r = rnd(act(g, u)).
// With fp32 outputs nothing is rounded: the oracle of the fast kernel for big shapes.
#include "up_projection_fwd.hpp"

#include "core/activation_math.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

template <class Act, class Output>
__global__ void __launch_bounds__(plain::kThreads)
    up_projection_fwd_plain(UpProjectionFwdArguments const p, Act const act) {
  int64_t const n = p.intermediate;
  int64_t const output = plain::output_idx();
  int64_t const row = output / n;
  if (row >= p.gmem_expert_offsets[p.experts]) return;
  int64_t const i = output % n;
  int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
  int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
  auto const* const gmem_x = static_cast<__nv_bfloat16 const*>(p.x.gmem) + source * p.x.pitch;
  constexpr int kHalves = Act::kGated ? 2 : 1;
  float h[2] = {};
  for (int half = 0; half < kHalves; ++half) {
    WeightRows const& w = p.w_up[half];
    Output rounded;
    plain::round_to(rounded,
                    plain::dot(gmem_x, plain::row_of(w, expert, i), p.hidden, w.column_stride) +
                        plain::bias_of(p.b_up[half], expert, i));
    if (p.gmem_h != nullptr) {
      int64_t const column = p.interleaved ? 2 * i + half : half * n + i;
      static_cast<Output*>(p.gmem_h)[row * kHalves * n + column] = rounded;
    }
    h[half] = plain::widen(rounded);
  }
  if (p.gmem_a != nullptr) {
    plain::round_to(static_cast<Output*>(p.gmem_a)[output], act.forward(h[0], h[1]));
  }
}

template <class Output>
cudaError_t launch_twin(UpProjectionFwdArguments const& args, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  core::visit_activation(args.activation, [&](auto act) {
    auto* const kernel = &up_projection_fwd_plain<decltype(act), Output>;
    error = plain::launch(kernel, args.rows * args.intermediate, stream, args, act);
  });
  return error;
}

}  // namespace

cudaError_t launch_up_projection_fwd_plain(UpProjectionFwdArguments const& args,
                                           cudaStream_t stream) {
  return launch_twin<__nv_bfloat16>(args, stream);
}

cudaError_t plain::up_projection_fwd(UpProjectionFwd const& p, int64_t rows, cudaStream_t stream) {
  int64_t const n = p.intermediate, d = p.hidden;
  auto const half = [&](int64_t first_row) {
    return WeightRows{.gmem = static_cast<__nv_bfloat16 const*>(p.gmem_w_up) + first_row * d,
                      .expert_stride = 2 * n * d,
                      .row_stride = d,
                      .column_stride = 1,
                      .block = n};
  };
  return launch_twin<float>({.x = {p.gmem_x, rows, d},
                             .gmem_gather_index = p.gather_index,
                             .gmem_expert_offsets = p.expert_offsets,
                             .w_up = {half(0), half(n)},
                             .b_up = {},
                             .activation = {},
                             .gmem_h = p.gmem_h,
                             .gmem_a = p.gmem_a,
                             .rows = rows,
                             .hidden = d,
                             .intermediate = n,
                             .experts = p.experts,
                             .gmem_tile_counter = nullptr},
                            stream);
}

}  // namespace tessera::cuda
