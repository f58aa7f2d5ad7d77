// SPDX-License-Identifier: Apache-2.0
// aggregate, one thread per output: o_tc = rnd([o_tc +] sum over slots j of t of s_j * y[inverse_permutation[j], c]).
// The same fp32 operations in the same order as the kernel, hence the same bits, for any d and pitch.
#include <cuda_bf16.h>

#include "../host/aggregate.hpp"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float widen(float value) { return value; }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void round_to(float& out, float value) { out = value; }
__device__ void round_to(__nv_bfloat16& out, float value) { out = __float2bfloat16_rn(value); }

template <class Element>
__global__ void __launch_bounds__(kThreads)
    aggregate_plain(__grid_constant__ AggregateArguments const p) {
  int64_t const output = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  int64_t const token = output / p.hidden;
  if (token >= p.tokens) return;
  int64_t const column = output - token * p.hidden;
  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const begin = varies ? p.gmem_token_offsets[token] : token * p.top_k;
  int64_t const end = varies ? p.gmem_token_offsets[token + 1] : begin + p.top_k;
  auto const* gmem_y = static_cast<Element const*>(p.gmem_y);
  Element& o = static_cast<Element*>(p.gmem_o)[token * p.o_pitch + column];
  float sum = 0;
  if (p.adds_to_o && (p.gmem_adds == nullptr || p.gmem_adds[token] != 0)) sum += widen(o);
  for (int64_t slot = begin; slot < end; ++slot) {
    int64_t const row = p.gmem_inverse_permutation[slot];
    if (row < 0) continue;
    float const score = p.gmem_scores != nullptr ? p.gmem_scores[slot] : 1.0f;
    sum = fmaf(score, widen(gmem_y[row * p.hidden + column]), sum);
  }
  round_to(o, sum);
}

}  // namespace

template <class Element>
cudaError_t launch_aggregate_plain(AggregateArguments const& args, cudaStream_t stream) {
  if (args.tokens == 0 || args.hidden == 0) return cudaSuccess;
  int64_t const ctas = (args.tokens * args.hidden + kThreads - 1) / kThreads;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  aggregate_plain<Element><<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t launch_aggregate_plain<__nv_bfloat16>(AggregateArguments const&, cudaStream_t);
template cudaError_t launch_aggregate_plain<float>(AggregateArguments const&, cudaStream_t);

}  // namespace tessera::cuda
