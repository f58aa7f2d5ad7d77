// SPDX-License-Identifier: Apache-2.0
// Matrices to e4m3 codes with a scale for each block, and back. Pointers were checked by src/ops.
#pragma once

#include <cstdint>

#include "core/fp8.hpp"
#include "core/thread_pool.hpp"
#include "cpu/parallel/gemm.hpp"
#include "tessera/low_precision.hpp"

namespace tessera::cpu {

/// mxfp8, whose scales are e8m0, or fp8-block, whose scales are fp32.
constexpr bool is_mxfp8(QuantiseBlock block) noexcept { return block >= QuantiseBlock::row_32; }
constexpr bool is_mxfp8(ScaleRule rule) noexcept { return rule >= ScaleRule::rceil; }

/// Rows and columns of a block.
struct BlockExtent {
  std::int64_t rows = 1, columns = 1;
};
constexpr BlockExtent extent_of(QuantiseBlock block) noexcept {
  switch (block) {
    case QuantiseBlock::row_128:
      return {1, 128};
    case QuantiseBlock::square_128:
      return {128, 128};
    case QuantiseBlock::row_32:
      return {1, 32};
    case QuantiseBlock::column_32:
      return {32, 1};
    case QuantiseBlock::square_32:
      break;
  }
  return {32, 32};
}

/// Where the scale of a block stands: that of block (i, j) at i * row_stride + j * column_stride, or in atoms, where
/// the matrix that is multiplied has `atom_blocks` blocks along k.
struct ScaleView {
  void* data = nullptr;
  std::int64_t row_stride = 0, column_stride = 1;
  std::int64_t atom_blocks = 0;       ///< 0: no atoms
  std::int64_t first_atom_block = 0;  ///< of this matrix, where several stand side by side along k
};

/// Rows of weights, whose order may put them in groups: row r is row r % group of the view, r / group steps further.
template <class T>
struct GroupedRows {
  MatrixView<T> first;
  std::int64_t group = INT64_MAX, group_stride = 0;
  [[nodiscard]] T* row(std::int64_t r) const noexcept {
    return first.data + r / group * group_stride + r % group * first.row_stride;
  }
};

/// One matrix. The codes are contiguous along a row, those of the transpose along a column.
template <class T>
struct QuantiseMatrix {
  QuantiseBlock block = QuantiseBlock::row_128;
  ScaleRule rule = ScaleRule::fp32;
  std::int64_t rows = 0, width = 0;
  GroupedRows<T const> values;
  core::E4m3* codes = nullptr;  ///< null: not made
  std::int64_t code_pitch = 0;
  core::E4m3* transposed = nullptr;  ///< null: not made
  std::int64_t transposed_pitch = 0;
  ScaleView scales = {};         ///< null: not stored
  float* dequantised = nullptr;  ///< code * scale; null: not made. May be `values`.
  std::int64_t dequantised_pitch = 0;
};
/// T: float or Bf16.
template <class T>
void quantise(QuantiseMatrix<T> const& matrix, core::ThreadPool& pool) noexcept;
/// The same on the calling thread.
template <class T>
void quantise(QuantiseMatrix<T> const& matrix) noexcept;

template <class T>
struct DequantiseMatrix {
  QuantiseBlock block = QuantiseBlock::row_128;
  std::int64_t rows = 0, width = 0;
  core::E4m3 const* codes = nullptr;
  ScaleView scales;  ///< read only
  T* values = nullptr;
};
template <class T>
void dequantise(DequantiseMatrix<T> const& matrix, core::ThreadPool& pool) noexcept;
/// The same on the calling thread.
template <class T>
void dequantise(DequantiseMatrix<T> const& matrix) noexcept;

}  // namespace tessera::cpu
