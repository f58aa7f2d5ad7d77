// SPDX-License-Identifier: Apache-2.0
// All weight gradients share this: sums over the rows of an expert in blocks of kReductionBlock, first to last,
// stored or added to their destination once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/parallel/gemm.hpp"
#include "cpu/parallel/layer.hpp"

namespace tessera::cpu {

/// Rows of dw_up, or columns of dw_down, that are summed at a time.
inline constexpr std::int64_t kSumBlock = 512;

/// Scratch of WgradSum: the running sum and the GEMM's.
inline std::int64_t wgrad_sum_floats(std::int64_t gemm_m, std::int64_t gemm_n) noexcept {
  return gemm_m * gemm_n + gemm_scratch_floats(gemm_m, gemm_n, kReductionBlock);
}

/// Sums of products over blocks of rows. The running sum stands in fp32 scratch unless the destination can hold it:
/// an fp32 gradient that is written, or a single block. T: the gradient's type.
template <class T>
class WgradSum {
 public:
  /// `rows`: all that will be added.
  WgradSum(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t rows,
           MatrixView<T> const& destination, GradientMode mode, float* scratch) noexcept
      : gemm_m_(gemm_m),
        gemm_n_(gemm_n),
        rows_(rows),
        destination_(destination),
        sum_{scratch, gemm_n, 1},
        gemm_scratch_(scratch + gemm_m * gemm_n),
        mode_(mode),
        in_place_(mode == GradientMode::write &&
                  (std::is_same_v<T, float> || rows <= kReductionBlock)) {}

  /// sum += a (gemm_m x rows) b (rows x gemm_n), at most kReductionBlock rows
  void add(std::int64_t rows, PanelSource const& a, PanelSource const& b) noexcept {
    GemmResult c = in_place_ ? result(destination_) : result(sum_);
    c.add = !first_;
    gemm(gemm_m_, gemm_n_, rows, a, b, c, gemm_scratch_);
    first_ = false;
  }
  /// Empty experts: zeros with `write`, untouched with `accumulate`.
  void finish() noexcept {
    bool const accumulate = mode_ == GradientMode::accumulate;
    if (rows_ == 0 ? accumulate : in_place_) return;
    for (std::int64_t r = 0; r < gemm_m_; ++r) {
      for (std::int64_t c = 0; c < gemm_n_; ++c) {
        T& out = *destination_.from(r, c).data;
        float const sum = rows_ == 0 ? 0.0f : *sum_.from(r, c).data;
        out = round_to<T>(accumulate ? to_fp32(out) + sum : sum);
      }
    }
  }

 private:
  std::int64_t gemm_m_, gemm_n_, rows_;
  MatrixView<T> destination_;
  Matrix sum_;
  float* gemm_scratch_;
  GradientMode mode_;
  bool in_place_;
  bool first_ = true;
};

/// The same rule for a vector that was summed in `sum`.
template <class T>
void store_bias_gradient(float const* sum, std::int64_t count, bool has_rows, GradientMode mode,
                         T* destination) noexcept {
  bool const write = mode == GradientMode::write;
  if (!write && !has_rows) return;
  for (std::int64_t i = 0; i < count; ++i) {
    destination[i] = round_to<T>(write ? sum[i] : to_fp32(destination[i]) + sum[i]);
  }
}

}  // namespace tessera::cpu
