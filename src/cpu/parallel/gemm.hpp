// SPDX-License-Identifier: Apache-2.0
// c = (c +) a b (+ bias) on one thread, operands and result in fp32 or bf16, sums in fp32.
//
// Operands are packed into panels, which is where every layout, transpose, gather and storage type ends: the
// kernels (gemm_kernels.hpp) see panels only. Panels hold all of k, so that each sum stays in a register from first to
// last; callers cut a long k themselves.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/parallel/gemm_kernels.hpp"

namespace tessera::cpu {

/// A strided matrix; element (r, c) at data[r*row_stride + c*col_stride], one stride being 1.
template <class T>
struct MatrixView {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  [[nodiscard]] MatrixView transposed() const noexcept { return {data, col_stride, row_stride}; }
  [[nodiscard]] MatrixView from(std::int64_t row, std::int64_t col) const noexcept {
    return from_offset(row * row_stride + col * col_stride);
  }
  [[nodiscard]] MatrixView from_offset(std::int64_t offset) const noexcept {
    return {data + offset, row_stride, col_stride};
  }
};
using ConstMatrix = MatrixView<float const>;
using Matrix = MatrixView<float>;

/// a (gemm_m x gemm_k) of a product. `gather`, where given, names the rows of a.
template <class T>
PanelSource left_operand(MatrixView<T> const& a, std::int32_t const* gather = nullptr) noexcept {
  bool const k_contiguous = a.col_stride == 1;
  return {a.data, core::kDTypeOf<std::remove_const_t<T>>,
          k_contiguous ? a.row_stride : a.col_stride, k_contiguous, gather};
}
/// a^T of a product: gemm_k x gemm_m is stored, `gather` names its rows. (A matrix of one column has the strides of its
/// transpose, so a gathered operand is marked as transposed.)
template <class T>
PanelSource left_operand_transposed(MatrixView<T> const& a,
                                    std::int32_t const* gather = nullptr) noexcept {
  if (gather == nullptr) return left_operand(a.transposed());
  return {a.data, core::kDTypeOf<std::remove_const_t<T>>, a.row_stride, false, gather};
}
/// b (gemm_k x gemm_n) of a product; `gather`, where given, names its rows.
template <class T>
PanelSource right_operand(MatrixView<T> const& b, std::int32_t const* gather = nullptr) noexcept {
  return left_operand_transposed(b, gather);
}

/// Where the product goes: fp32 or bf16, one stride being 1.
struct GemmResult {
  void* data = nullptr;
  DType dtype = DType::fp32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  void const* bias = nullptr;  ///< [gemm_n] of `dtype`, rows contiguous only; or null
  bool add = false;            ///< fp32 only: to what is there
};
template <class T>
GemmResult result(MatrixView<T> const& c, std::type_identity_t<T> const* bias = nullptr) noexcept {
  return {c.data, core::kDTypeOf<T>, c.row_stride, c.col_stride, bias, false};
}

/// Says what becomes of the panels of b: packed for one product, packed and left in the scratch for products of other
/// rows with the same b, or those that such a product left. Too many panels are packed again all the same.
enum class Panels { used_once, kept, reused };

/// Nothing happens where gemm_m or gemm_n is 0; gemm_k = 0 sums nothing. `scratch` holds
/// gemm_scratch_floats(gemm_m, gemm_n, gemm_k) floats. `b_panels` other than used_once: rows of c contiguous.
void gemm(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k, PanelSource const& a,
          PanelSource const& b, GemmResult const& c, float* scratch,
          Panels b_panels = Panels::used_once) noexcept;

/// The same by a chosen kernel set; one that multiplies bf16 takes no other operands.
void gemm_with(GemmKernels const& kernels, std::int64_t gemm_m, std::int64_t gemm_n,
               std::int64_t gemm_k, PanelSource const& a, PanelSource const& b, GemmResult const& c,
               float* scratch, Panels b_panels = Panels::used_once) noexcept;

/// For any product up to this size.
std::int64_t gemm_scratch_floats(std::int64_t gemm_m, std::int64_t gemm_n,
                                 std::int64_t gemm_k) noexcept;

}  // namespace tessera::cpu
