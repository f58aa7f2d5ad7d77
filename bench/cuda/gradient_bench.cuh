// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of the backward GEMMs share: cuBLAS in any transposition, and comparison with fp32
// values element by element and in norm.
#pragma once

#include "gemm_bench.cuh"

namespace tessera::bench {

struct Operand {
  bf16 const* gmem;
  cublasOperation_t op;
  int64_t ld, stride;
};

// Column-major, `batch` times: C (m x n, leading dimension ldc) = op(A) op(B).
inline void cublas_gemm(cublasHandle_t handle, int64_t m, int64_t n, int64_t k, Operand a,
                        Operand b, void* c, cudaDataType_t type, int64_t ldc, int64_t c_stride,
                        int batch) {
  float const one = 1;
  float const zero = 0;
  cublasStatus_t const status = cublasGemmStridedBatchedEx(
      handle, a.op, b.op, int(m), int(n), int(k), &one, a.gmem, CUDA_R_16BF, int(a.ld), a.stride,
      b.gmem, CUDA_R_16BF, int(b.ld), b.stride, &zero, c, type, int(ldc), c_stride, batch,
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS) std::fprintf(stderr, "cuBLAS status %d\n", int(status));
}

struct Difference {
  unsigned bad;        // outside the allowance, or NaN
  unsigned worst_e3;   // largest |out - ref| / allowance, in units of 1e-3
  double error, norm;  // sums of squares
};

// Allowance per element: relative * |ref| + floor * (allowance of the element, or 1).
template <typename T>
__global__ void compare_elements(T const* out, float const* ref, float const* scale, int64_t count,
                                 float relative, float floor, Difference* result) {
  float error = 0, norm = 0, worst = 0;
  unsigned bad = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float const r = ref[i];
    float const delta = fabsf(float(out[i]) - r);
    float const allowance = relative * fabsf(r) + floor * (scale != nullptr ? scale[i] : 1.0f);
    if (!(delta <= allowance)) ++bad;
    worst = fmaxf(worst, delta / allowance);
    error += delta * delta;
    norm += r * r;
  }
  if (bad) atomicAdd(&result->bad, bad);
  atomicMax(&result->worst_e3, unsigned(fminf(worst, 4e6f) * 1e3f));
  atomicAdd(&result->error, double(error));
  atomicAdd(&result->norm, double(norm));
}

// Whether `out` is within the allowance everywhere and within `norm_limit` in norm; adds to the note.
template <typename T>
bool accepts(char const* name, T const* out, float const* ref, float const* scale, int64_t count,
             float relative, float floor, double norm_limit, std::string& note) {
  DeviceBuffer<Difference> result(1);
  TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Difference)));
  compare_elements<<<1024, 256>>>(out, ref, scale, count, relative, floor, result.get());
  Difference d{};
  TESSERA_CUDA(cudaMemcpy(&d, result.get(), sizeof d, cudaMemcpyDeviceToHost));
  double const norm = d.norm > 0 ? std::sqrt(d.error / d.norm) : (d.error > 0 ? 1.0 : 0.0);
  char text[100];
  std::snprintf(text, sizeof text, "%s %.1e elem %.2f bad %u; ", name, norm, d.worst_e3 * 1e-3,
                d.bad);
  note += text;
  return d.bad == 0 && norm <= norm_limit;
}

template <typename T>
bool is_poisoned(T const* out, int64_t count) {
  std::vector<unsigned char> bytes(size_t(count) * sizeof(T));
  TESSERA_CUDA(cudaMemcpy(bytes.data(), out, bytes.size(), cudaMemcpyDeviceToHost));
  return std::all_of(bytes.begin(), bytes.end(), [](unsigned char b) { return b == 0xff; });
}

}  // namespace tessera::bench
