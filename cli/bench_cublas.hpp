// SPDX-License-Identifier: Apache-2.0
// What a layer on a GPU is measured against: its GEMMs as cuBLAS batched calls on contiguous balanced data.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.hpp"
#include "tessera/shape.hpp"

namespace tessera::cli {

/// libcublas.so.13, loaded at run time. Throws CommandError (exit 3) where it is not installed.
class Cublas {
 public:
  Cublas();
  ~Cublas();
  Cublas(Cublas const&) = delete;

  /// c [batch,m,n] = a [batch,m,k] b [batch,n,k]^T, all bf16 and contiguous, fp32 sums.
  void batched_gemm(device::Stream const& stream, std::int64_t batch, std::int64_t m,
                    std::int64_t n, std::int64_t k, void const* a, void const* b, void* c) const;

 private:
  struct Functions;
  std::unique_ptr<Functions> functions_;
  void* handle_ = nullptr;
};

/// The two GEMMs of forward over R rows spread evenly: R/E rows per expert, rounded to the nearest.
class CublasBound {
 public:
  CublasBound(Cublas const& cublas, device::Stream const& stream, std::int32_t device,
              MoeDesc const& desc, std::int64_t rows);

  void up(device::Stream const& stream) const;    ///< h = x W^T
  void down(device::Stream const& stream) const;  ///< y = a D^T

 private:
  Cublas const& cublas_;
  std::int64_t experts_, rows_, hidden_, intermediate_, up_columns_;
  device::Memory x_, h_, a_, y_, w_up_, w_down_;
};

/// TFLOP/s of an 8192^3 bf16 product: the median of ten.
double gemm_ceiling_tflops(Cublas const& cublas, device::Stream const& stream, std::int32_t device);

}  // namespace tessera::cli
