// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad, one CTA per row and group of kScoreGroup columns, one thread per column i:
//   t = dO[gather_index[r]] . w_down[e,:,i],  (g, u) = h_r,  a = act(g, u),
//   dh_r = rnd(J_act(g, u)^T s t),  a'_r = rnd(s a),  partial of ds_r = sum over the group of t*a
#include "../host/projection_backward.hpp"
#include "core/activation_math.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = int(kScoreGroup);

// Sum over the CTA's threads, halves folded; only thread 0 gets it.
__device__ float sum_of_threads(float value) {
  __shared__ float smem_values[kThreads];
  smem_values[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) smem_values[threadIdx.x] += smem_values[threadIdx.x + half];
  }
  return smem_values[0];
}

// Everything of column i of one row; returns its term of ds.
template <class Act>
__device__ float column_gradient(DownProjectionDgradArguments const& p, Act const& act, int64_t row,
                                 int64_t i) {
  int64_t const n = p.intermediate;
  int64_t const expert = plain::expert_of_row(p.gmem_expert_offsets, p.experts, row);
  int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
  auto const* const gmem_d_o = static_cast<__nv_bfloat16 const*>(p.d_o.gmem) + source * p.d_o.pitch;
  auto const* const gmem_w = plain::row_of(p.w_down, expert, 0) + i * p.w_down.column_stride;
  float const t = plain::dot(gmem_d_o, gmem_w, p.hidden, p.w_down.row_stride);

  constexpr int kHalves = Act::kGated ? 2 : 1;
  int64_t const gate = row * kHalves * n + (p.interleaved ? 2 * i : i);
  int64_t const up = gate + (p.interleaved ? 1 : n);
  auto const* const gmem_h = static_cast<__nv_bfloat16 const*>(p.gmem_h);
  auto* const gmem_dh = static_cast<__nv_bfloat16*>(p.gmem_dh);
  float const score = p.gmem_scores[p.gmem_sort_permutation[row]];
  float const g = plain::widen(gmem_h[gate]);
  float const u = Act::kGated ? plain::widen(gmem_h[up]) : 0.0f;
  core::ActivationGradient const gradient = act.backward(g, u, score * t);
  plain::round_to(gmem_dh[gate], gradient.dg);
  if (Act::kGated) plain::round_to(gmem_dh[up], gradient.du);
  if (p.gmem_a_scaled != nullptr) {
    plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_a_scaled)[row * n + i], score * gradient.a);
  }
  return t * gradient.a;
}

template <class Act>
__global__ void __launch_bounds__(kThreads)
    down_projection_dgrad_plain(DownProjectionDgradArguments const p, Act const act) {
  int64_t const groups = score_groups(p.intermediate);
  int64_t const row = blockIdx.x / groups, group = blockIdx.x % groups;
  if (row >= p.gmem_expert_offsets[p.experts]) return;
  int64_t const i = group * kScoreGroup + threadIdx.x;
  float const term = i < p.intermediate ? column_gradient(p, act, row, i) : 0.0f;
  float const sum = sum_of_threads(term);
  if (threadIdx.x == 0 && p.gmem_ds_partials != nullptr) {
    p.gmem_ds_partials[row * groups + group] = sum;
  }
}

}  // namespace

cudaError_t launch_down_projection_dgrad_plain(DownProjectionDgradArguments const& args,
                                               cudaStream_t stream) {
  int64_t const ctas = args.rows * score_groups(args.intermediate);
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  core::visit_activation(args.activation, [&](auto act) {
    down_projection_dgrad_plain<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args, act);
  });
  return cudaGetLastError();
}

}  // namespace tessera::cuda
