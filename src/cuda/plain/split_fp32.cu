// SPDX-License-Identifier: Apache-2.0
// split_fp32, one thread per value: high = rnd(v), middle = rnd(v - high), low = the rest, each of 8 bits.
#include "../host/split_fp32.hpp"

#include <cmath>

#include "dot.cuh"

namespace tessera::cuda {
namespace {

__global__ void __launch_bounds__(plain::kThreads)
    split_fp32_plain(__grid_constant__ SplitArguments const p) {
  int64_t const columns = (p.columns + p.block - 1) / p.block * p.block;
  int64_t const output = plain::output_idx(), row = output / columns, column = output % columns;
  if (row >= p.rows) return;
  float const value = column < p.columns ? p.gmem_from[row * p.from_pitch + column] : 0.0f;
  __nv_bfloat16 high = __float2bfloat16_rn(value);
  // The largest values would round to infinity.
  if (isfinite(value) && !isfinite(__bfloat162float(high))) high = __float2bfloat16_rz(value);
  float const rest = isfinite(value) ? value - __bfloat162float(high) : 0.0f;
  __nv_bfloat16 const middle = __float2bfloat16_rn(rest);
  float const low = rest - __bfloat162float(middle);
  auto* const gmem = static_cast<__nv_bfloat16*>(p.gmem_out) + row * p.row_pitch +
                     column / p.block * p.block_pitch + column % p.block;
  for (int t = 0; t < p.num_terms; ++t) {
    gmem[t * p.term_pitch] = p.terms[t] == SplitTerm::high     ? high
                             : p.terms[t] == SplitTerm::middle ? middle
                                                               : __float2bfloat16_rn(low);
  }
}

}  // namespace

cudaError_t launch_split_fp32_plain(SplitArguments const& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  int64_t const columns = (args.columns + args.block - 1) / args.block * args.block;
  return plain::launch(split_fp32_plain, args.rows * columns, stream, args);
}

}  // namespace tessera::cuda
