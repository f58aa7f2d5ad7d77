// SPDX-License-Identifier: Apache-2.0
// What both weight gradients share: sums over the rows of an expert in blocks, first to last, added once to
// their destination.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/parallel/gemm.hpp"
#include "cpu/parallel/layer.hpp"

namespace tessera::cpu {

/// Sums of products over blocks of rows. With `write` the destination itself holds the running sum; with
/// `accumulate` a scratch matrix does and is added once at the end.
class WgradSum {
 public:
  WgradSum(std::int64_t gemm_m, std::int64_t gemm_n, Matrix destination, GradientMode mode,
           float* scratch) noexcept
      : gemm_m_(gemm_m),
        gemm_n_(gemm_n),
        destination_(destination),
        sum_(mode == GradientMode::write ? destination : Matrix{scratch, gemm_n, 1}),
        mode_(mode) {}

  /// sum += a (gemm_m x rows) b (rows x gemm_n)
  void add(std::int64_t rows, ConstMatrix a, ConstMatrix b) noexcept {
    gemm(gemm_m_, gemm_n_, rows, a, b, first_ ? 0.0f : 1.0f, sum_);
    first_ = false;
  }
  /// Empty experts: zeros with `write`, untouched with `accumulate`.
  void finish() noexcept {
    if (mode_ == GradientMode::write && !first_) return;
    if (mode_ == GradientMode::accumulate && first_) return;
    for (std::int64_t r = 0; r < gemm_m_; ++r) {
      for (std::int64_t c = 0; c < gemm_n_; ++c) {
        float& out = *destination_.from(r, c).data;
        out = first_ ? 0.0f : out + *sum_.from(r, c).data;
      }
    }
  }

 private:
  std::int64_t gemm_m_, gemm_n_;
  Matrix destination_, sum_;
  GradientMode mode_;
  bool first_ = true;
};

/// The same rule for a vector that was summed in `sum`.
inline void store_bias_gradient(float const* sum, std::int64_t count, bool has_rows,
                                GradientMode mode, float* destination) noexcept {
  if (mode == GradientMode::write) {
    std::copy_n(sum, count, destination);
  } else if (has_rows) {
    for (std::int64_t i = 0; i < count; ++i) destination[i] += sum[i];
  }
}

}  // namespace tessera::cpu
