// SPDX-License-Identifier: Apache-2.0
// c = beta*c + a b on one thread, any row and column strides: so every weight layout and every transpose is
// served without a copy.
#pragma once

#include <cstdint>

namespace tessera::cpu {

/// A strided matrix; element (r, c) at data[r*row_stride + c*col_stride].
template <class T>
struct MatrixView {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  [[nodiscard]] MatrixView transposed() const noexcept { return {data, col_stride, row_stride}; }
  [[nodiscard]] MatrixView from(std::int64_t row, std::int64_t col) const noexcept {
    return {data + row * row_stride + col * col_stride, row_stride, col_stride};
  }
};
using ConstMatrix = MatrixView<float const>;
using Matrix = MatrixView<float>;

/// c (gemm_m x gemm_n) = beta*c + a (gemm_m x gemm_k) b (gemm_k x gemm_n). With beta = 0, c is not read.
/// Nothing happens to c where gemm_m or gemm_n is 0; gemm_k = 0 gives beta*c.
void gemm(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k, ConstMatrix a,
          ConstMatrix b, float beta, Matrix c) noexcept;

}  // namespace tessera::cpu
