// SPDX-License-Identifier: Apache-2.0
// A block's amax is the largest of its magnitudes as integers, which puts NaN above infinity above all numbers; then
// s = scale(amax), code = e4m3(v * fp32(1/s)).
#include "cpu/parallel/quantise.hpp"

#include <algorithm>

namespace tessera::cpu {
namespace {

using core::Bf16;
using core::BlockScale;
using core::E4m3;
using core::E8m0;
using core::round_to;
using core::to_fp32;

/// The corner of a block.
struct Corner {
  std::int64_t row, column;
};

/// body(place) for every scale of block (i, j): 32 places for the rows of a square block in atoms, else one.
template <class Body>
void for_each_place(ScaleView const& scales, QuantiseBlock block, std::int64_t i, std::int64_t j,
                    Body&& body) {
  if (scales.atom_blocks == 0) return body(i * scales.row_stride + j * scales.column_stride);
  bool const columns = block == QuantiseBlock::column_32;  // rows of the transpose are multiplied
  std::int64_t const row = columns ? j : i, k = (columns ? i : j) + scales.first_atom_block;
  std::int64_t const copies = block == QuantiseBlock::square_32 ? 32 : 1;
  for (std::int64_t r = row * copies; r < (row + 1) * copies; ++r) {
    body(scale_atom_offset(r, k, scales.atom_blocks));
  }
}

template <class T>
std::uint32_t largest_magnitude(GroupedRows<T const> const& values, BlockExtent extent,
                                Corner at) noexcept {
  std::uint32_t largest = 0;
  for (std::int64_t r = at.row; r < at.row + extent.rows; ++r) {
    T const* const row = values.row(r);
    for (std::int64_t c = at.column; c < at.column + extent.columns; ++c) {
      float const value = to_fp32(row[c * values.first.col_stride]);
      largest = std::max(largest, core::fp32_bits(value) & 0x7fffffffu);
    }
  }
  return largest;
}

/// Chooses the scale of block (i, j), stores it, and says what the block is multiplied by.
template <class T>
BlockScale store_scale(QuantiseMatrix<T> const& m, std::uint32_t largest, std::int64_t i,
                       std::int64_t j) noexcept {
  bool const stored = m.scales.data != nullptr;
  if (!is_mxfp8(m.rule)) {
    BlockScale const scale =
        m.rule == ScaleRule::fp32 ? core::fp32_scale(largest) : core::pow2_scale(largest);
    if (!stored) return scale;
    for_each_place(m.scales, m.block, i, j, [&](std::int64_t place) {
      static_cast<float*>(m.scales.data)[place] = scale.scale;
    });
    return scale;
  }
  E8m0 const scale = core::e8m0_scale(largest, m.rule == ScaleRule::floor);
  if (!stored) return core::block_scale(scale);
  for_each_place(m.scales, m.block, i, j,
                 [&](std::int64_t place) { static_cast<E8m0*>(m.scales.data)[place] = scale; });
  return core::block_scale(scale);
}

template <class T>
void quantise_block(QuantiseMatrix<T> const& m, BlockExtent extent, std::int64_t i,
                    std::int64_t j) noexcept {
  Corner const at{i * extent.rows, j * extent.columns};
  BlockScale const scale = store_scale(m, largest_magnitude(m.values, extent, at), i, j);
  for (std::int64_t r = at.row; r < at.row + extent.rows; ++r) {
    T const* const row = m.values.row(r);
    for (std::int64_t c = at.column; c < at.column + extent.columns; ++c) {
      E4m3 const code = core::quantise(to_fp32(row[c * m.values.first.col_stride]), scale);
      if (m.codes != nullptr) m.codes[r * m.code_pitch + c] = code;
      if (m.transposed != nullptr) m.transposed[c * m.transposed_pitch + r] = code;
      if (m.dequantised != nullptr) {
        m.dequantised[r * m.dequantised_pitch + c] = to_fp32(code) * scale.scale;
      }
    }
  }
}

float scale_at(ScaleView const& scales, bool e8m0, std::int64_t place) noexcept {
  return e8m0 ? to_fp32(static_cast<E8m0 const*>(scales.data)[place])
              : static_cast<float const*>(scales.data)[place];
}

template <class T>
void quantise_block_row(QuantiseMatrix<T> const& m, BlockExtent extent, std::int64_t i) noexcept {
  for (std::int64_t j = 0; j < m.width / extent.columns; ++j) quantise_block(m, extent, i, j);
}

template <class T>
void dequantise_row(DequantiseMatrix<T> const& m, BlockExtent extent, std::int64_t r) noexcept {
  bool const e8m0 = is_mxfp8(m.block);
  for (std::int64_t c = 0; c < m.width; ++c) {
    float scale = 0;
    for_each_place(m.scales, m.block, r / extent.rows, c / extent.columns,
                   [&](std::int64_t place) { scale = scale_at(m.scales, e8m0, place); });
    m.values[r * m.width + c] = round_to<T>(to_fp32(m.codes[r * m.width + c]) * scale);
  }
}

}  // namespace

template <class T>
void quantise(QuantiseMatrix<T> const& m, core::ThreadPool& pool) noexcept {
  BlockExtent const extent = extent_of(m.block);
  pool.run(
      m.rows / extent.rows, [&](std::int64_t i, int) { quantise_block_row(m, extent, i); },
      8 * m.rows * m.width);
}
template <class T>
void quantise(QuantiseMatrix<T> const& m) noexcept {
  BlockExtent const extent = extent_of(m.block);
  for (std::int64_t i = 0; i < m.rows / extent.rows; ++i) quantise_block_row(m, extent, i);
}

template <class T>
void dequantise(DequantiseMatrix<T> const& m, core::ThreadPool& pool) noexcept {
  BlockExtent const extent = extent_of(m.block);
  pool.run(
      m.rows, [&](std::int64_t r, int) { dequantise_row(m, extent, r); }, 8 * m.rows * m.width);
}
template <class T>
void dequantise(DequantiseMatrix<T> const& m) noexcept {
  BlockExtent const extent = extent_of(m.block);
  for (std::int64_t r = 0; r < m.rows; ++r) dequantise_row(m, extent, r);
}

template void quantise<float>(QuantiseMatrix<float> const&, core::ThreadPool&) noexcept;
template void quantise<Bf16>(QuantiseMatrix<Bf16> const&, core::ThreadPool&) noexcept;
template void quantise<float>(QuantiseMatrix<float> const&) noexcept;
template void quantise<Bf16>(QuantiseMatrix<Bf16> const&) noexcept;
template void dequantise<float>(DequantiseMatrix<float> const&) noexcept;
template void dequantise<float>(DequantiseMatrix<float> const&, core::ThreadPool&) noexcept;
template void dequantise<Bf16>(DequantiseMatrix<Bf16> const&, core::ThreadPool&) noexcept;

}  // namespace tessera::cpu
