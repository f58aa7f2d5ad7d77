// SPDX-License-Identifier: Apache-2.0
// A layer on a GPU is measured against this: its GEMMs as cuBLAS batched calls on contiguous balanced data.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/device.hpp"
#include "tessera/shape.hpp"

namespace tessera::device {

/// libcublas.so.13, loaded at run time. Throws Error where it is not installed.
class Cublas {
 public:
  Cublas();
  ~Cublas();
  Cublas(Cublas const&) = delete;

  /// A row-major operand, or its transpose.
  struct Operand {
    void const* data = nullptr;
    bool transposed = false;
  };
  /// c [batch,m,n] = a b, all bf16 and contiguous, fp32 sums; a is [batch,m,k], or [batch,k,m] transposed, and b
  /// [batch,k,n], or [batch,n,k] transposed.
  void batched_gemm(Stream const& stream, std::int64_t batch, std::int64_t m, std::int64_t n,
                    std::int64_t k, Operand a, Operand b, void* c) const;
  /// c_i [rows_i,n] = a_i b_i^T for every i, all bf16 and contiguous, fp32 sums; a_i is [rows_i,k], b_i [n,k]. The
  /// pointers are arrays of the GPU.
  struct Groups {
    std::vector<int> rows;  ///< none of them 0
    void const* const* a = nullptr;
    void const* const* b = nullptr;
    void* const* c = nullptr;
  };
  void grouped_gemm(Stream const& stream, std::int64_t n, std::int64_t k,
                    Groups const& groups) const;

 private:
  struct Functions;
  std::unique_ptr<Functions> functions_;
  void* handle_ = nullptr;
};

/// The GEMMs of the experts over R rows spread evenly: R/E rows per expert, rounded to the nearest.
class CublasBound {
 public:
  /// Without `backward` the four of backward may not be run.
  CublasBound(Cublas const& cublas, Stream const& stream, std::int32_t device, MoeDesc const& desc,
              std::int64_t rows, bool backward);

  struct Gemm {
    char const* op;  ///< as work.hpp calls it
    std::function<void()> run;
  };
  [[nodiscard]] std::vector<Gemm> forward() const;  ///< h = x W^T, y = a D^T
  [[nodiscard]] std::vector<Gemm> backward()
      const;  ///< da = dO D, dx = dh W, dD = dO^T a, dW = dh^T x

 private:
  Cublas const& cublas_;
  Stream const& stream_;
  std::int64_t experts_, rows_, hidden_, intermediate_, up_columns_;
  Memory x_, h_, a_, y_, w_up_, w_down_, da_, dx_, dw_;
};

/// TFLOP/s of an 8192^3 bf16 product: the median of ten.
double gemm_ceiling_tflops(Cublas const& cublas, Stream const& stream, std::int32_t device);

}  // namespace tessera::device
