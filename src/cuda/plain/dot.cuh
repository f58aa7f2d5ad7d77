// SPDX-License-Identifier: Apache-2.0
// The plain twins of the GEMMs share this: one dot product in order, the expert of a row, one thread per output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../host/projection.hpp"

namespace tessera::cuda::plain {

constexpr int kThreads = 256;
constexpr int64_t kVector = 8;  // bf16 values of a 16-byte load

__device__ inline bool is_vector(void const* gmem) {
  return reinterpret_cast<uintptr_t>(gmem) % 16 == 0;
}

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// Sum over c of x[c] * w[c*stride] in order of c, added to `sum`. Wide loads where they are possible change no bit.
__device__ inline float dot(__nv_bfloat16 const* x, __nv_bfloat16 const* w, int64_t count,
                            int64_t stride, float sum = 0) {
  int64_t c = 0;
  if (stride == 1 && is_vector(x) && is_vector(w)) {
    for (; c + kVector <= count; c += kVector) {
      auto const xs = *reinterpret_cast<uint4 const*>(x + c);
      auto const ws = *reinterpret_cast<uint4 const*>(w + c);
      uint32_t const x_pairs[4] = {xs.x, xs.y, xs.z, xs.w};
      uint32_t const w_pairs[4] = {ws.x, ws.y, ws.z, ws.w};
      for (int i = 0; i < 4; ++i) {  // bf16 is the upper half of fp32
        sum = fmaf(__uint_as_float(x_pairs[i] << 16), __uint_as_float(w_pairs[i] << 16), sum);
        sum = fmaf(__uint_as_float(x_pairs[i] & 0xffff0000u),
                   __uint_as_float(w_pairs[i] & 0xffff0000u), sum);
      }
    }
  }
  for (; c < count; ++c) {
    sum = fmaf(__bfloat162float(x[c]), __bfloat162float(w[c * stride]), sum);
  }
  return sum;
}

// The same of other elements, decoded by widen() as they are read.
template <class X, class W>
__device__ float dot(X const* x, W const* w, int64_t count, int64_t stride, float sum = 0) {
  for (int64_t c = 0; c < count; ++c) sum = fmaf(widen(x[c]), widen(w[c * stride]), sum);
  return sum;
}

// The expert e with offsets[e] <= row < offsets[e+1].
__device__ inline int64_t expert_of_row(int32_t const* offsets, int64_t experts, int64_t row) {
  int64_t low = 0, high = experts;
  while (high - low > 1) {
    int64_t const middle = (low + high) / 2;
    (offsets[middle] <= row ? low : high) = middle;
  }
  return low;
}

__device__ inline __nv_bfloat16 const* row_of(WeightRows const& w, int64_t expert, int64_t row) {
  return static_cast<__nv_bfloat16 const*>(w.gmem) + w.row_offset(expert, row);
}

// A bias, or 0 where there is none.
__device__ inline float bias_of(WeightRows const& b, int64_t expert, int64_t row) {
  return b.gmem != nullptr ? __bfloat162float(*row_of(b, expert, row)) : 0.0f;
}

__device__ inline void round_to(float& out, float value) { out = value; }
__device__ inline void round_to(__nv_bfloat16& out, float value) {
  out = __float2bfloat16_rn(value);
}

// The gradient of a weight: overwritten, or the complete sum added once.
template <class Gradient>
__device__ void store_gradient(Gradient& out, float sum, bool accumulates) {
  round_to(out, accumulates ? widen(out) + sum : sum);
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel* kernel, int64_t outputs, cudaStream_t stream,
                   Arguments const&... arguments) {
  if (outputs == 0) return cudaSuccess;
  int64_t const ctas = (outputs + kThreads - 1) / kThreads;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

__device__ inline int64_t output_idx() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

}  // namespace tessera::cuda::plain
