// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd, plainly: one thread per pair (g, u) of one row, fp32 sums in order of c.
//   g = x[token(r)] . w_up[e, i], u = x[token(r)] . w_up[e, n+i], h_r = (g, u), a_r = g*sigmoid(g)*u
// Results stay fp32: the caller compares or rounds. Oracle of the fast kernel for big shapes.
#include "up_projection_fwd.hpp"

#include <cuda_bf16.h>

#include <cstdint>

namespace tessera::cuda::plain {
namespace {

__device__ float2 bf16_pair(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

__device__ int segment_of(int const* offsets, int segments, int64_t row) {
  int low = 0;
  int high = segments;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    int const middle = (low + high) / 2;
    (offsets[middle] <= row ? low : high) = middle;
  }
  return low;
}

__global__ void up_projection_fwd_kernel(UpProjectionFwd p) {
  int64_t const idx = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  int64_t const row = idx / p.intermediate;
  int const i = static_cast<int>(idx % p.intermediate);
  if (row >= p.expert_offsets[p.experts]) return;
  int const e = segment_of(p.expert_offsets, p.experts, row);
  int64_t const token = p.gather_index ? p.gather_index[row] : row;
  int64_t const d = p.hidden;
  int64_t const n = p.intermediate;
  auto const* x =
      reinterpret_cast<uint4 const*>(static_cast<char const*>(p.gmem_x) + token * d * 2);
  auto const* w = static_cast<char const*>(p.gmem_w_up) + int64_t{e} * 2 * n * d * 2;
  auto const* gate = reinterpret_cast<uint4 const*>(w + i * d * 2);
  auto const* up = reinterpret_cast<uint4 const*>(w + (n + i) * d * 2);
  float g = 0;
  float u = 0;
  for (int64_t c = 0; c < d / 8; ++c) {
    uint4 const xv = x[c];
    uint4 const gv = gate[c];
    uint4 const uv = up[c];
    uint32_t const xs[4] = {xv.x, xv.y, xv.z, xv.w};
    uint32_t const gs[4] = {gv.x, gv.y, gv.z, gv.w};
    uint32_t const us[4] = {uv.x, uv.y, uv.z, uv.w};
    for (int j = 0; j < 4; ++j) {
      float2 const xf = bf16_pair(xs[j]);
      float2 const gf = bf16_pair(gs[j]);
      float2 const uf = bf16_pair(us[j]);
      g = fmaf(xf.y, gf.y, fmaf(xf.x, gf.x, g));
      u = fmaf(xf.y, uf.y, fmaf(xf.x, uf.x, u));
    }
  }
  p.gmem_h[row * 2 * n + i] = g;
  p.gmem_h[row * 2 * n + n + i] = u;
  p.gmem_a[row * n + i] = g / (1.0f + expf(-g)) * u;
}

}  // namespace

cudaError_t up_projection_fwd(UpProjectionFwd const& p, int64_t rows, cudaStream_t stream) {
  int64_t const threads = rows * p.intermediate;
  if (threads == 0) return cudaSuccess;
  up_projection_fwd_kernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace tessera::cuda::plain
