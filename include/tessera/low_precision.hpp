// SPDX-License-Identifier: Apache-2.0
// Tensors in e4m3 with a scale for each block: value = code * scale. The rules: docs/numerics.md#fp8-and-mxfp8.
#pragma once

#include <cstdint>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/moe.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

/// Says which elements of a matrix share a scale, rows x columns: those of fp8-block (activations 1x128, weights
/// 128x128) and of mxfp8 (1x32 along rows, 32x1 along columns, 32x32).
enum class QuantiseBlock : std::int32_t {
  row_128 = 0,
  square_128 = 1,
  row_32 = 2,
  column_32 = 3,
  square_32 = 4,
};

/// Says how a block's scale follows from its largest magnitude, amax. fp32 and pow2 make fp32 scales of blocks of 128;
/// rceil and floor make e8m0 scales of blocks of 32.
enum class ScaleRule : std::int32_t {
  fp32 = 0,   ///< amax / 448: the largest magnitude is stored without error
  pow2 = 1,   ///< the least power of two under which no element exceeds 448
  rceil = 2,  ///< the same, as e8m0
  floor = 3,  ///< the power of two of amax over that of 448: elements beyond 448 become 448
};

/// The rule of the scales of a layer whose MoeDesc::quantises().
constexpr ScaleRule scale_rule(MoeDesc const& desc) noexcept {
  if (desc.precision == Precision::mxfp8) return ScaleRule::rceil;
  return desc.pow2_scales ? ScaleRule::pow2 : ScaleRule::fp32;
}

/// Says where the scales of a matrix of `rows` x `width` lie.
enum class ScaleLayout : std::int32_t {
  /// [rows/r, width/c] for blocks of r x c
  matrix = 0,
  /// [width/128, padded_scale_rows(rows)] for row_128: as the rows of sorted tensors are read; the padding is 0
  columns = 1,
  /// [scale_atom_bytes(..)] e8m0 of row_32, column_32 and square_32: atoms of 512 bytes for 128 rows and 4 blocks each,
  /// as Blackwell reads them. Row and block are those of the matrix whose rows are multiplied, which for column_32 is
  /// the transposed one; in square blocks 32 rows have the same scale. The padding is 0.
  atoms = 2,
};

/// Rows of a ScaleLayout::columns: a multiple of 4, so that every row of scales begins at 16 bytes.
constexpr std::int64_t padded_scale_rows(std::int64_t rows) noexcept { return (rows + 3) / 4 * 4; }

/// Place of the scale of `row` and `block` of a matrix that has `blocks` blocks along k, in ScaleLayout::atoms.
constexpr std::int64_t scale_atom_offset(std::int64_t row, std::int64_t block,
                                         std::int64_t blocks) noexcept {
  std::int64_t const atoms_along_k = (blocks + 3) / 4;
  return (row / 128 * atoms_along_k + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         block % 4;
}
/// Bytes of ScaleLayout::atoms for `rows` rows that are multiplied, with `blocks` blocks along k.
constexpr std::int64_t scale_atom_bytes(std::int64_t rows, std::int64_t blocks) noexcept {
  return (rows + 127) / 128 * ((blocks + 3) / 4) * 512;
}

/// One matrix, or one for each expert.
struct QuantiseArgs {
  QuantiseBlock block = QuantiseBlock::row_128;
  ScaleRule rule = ScaleRule::fp32;
  ScaleLayout layout = ScaleLayout::matrix;
  ConstTensor values = {};  ///< [rows,width] or [E,rows,width], fp32 or bf16
  Tensor codes = {};        ///< fp8_e4m3, the shape of values
  Tensor codes_transposed =
      {};              ///< optional fp8_e4m3 [width,rows] or [E,width,rows]: the same codes
  Tensor scales = {};  ///< fp32 or e8m0 (ScaleRule), of ScaleLayout; [E,..] where values are
};

/// Quantises `values`. Bytes depend on nothing but the values: they are the same for any number of threads.
///
/// A block with NaN or infinity becomes NaN as a whole, codes and scale; a block of zeros keeps its signs and has the
/// scale 1 (e8m0: 2^-127). `values` may be strided in all but its last dimension; the outputs are contiguous. Errors:
/// invalid_argument for extents that blocks do not divide (block of 128: pad to a multiple of 128), a rule or layout
/// that the block does not have, and tensors that do not fit; unsupported on cuda.
TESSERA_EXPORT Status quantise(Context const& context, QuantiseArgs const& args) noexcept;

/// The way back.
struct DequantiseArgs {
  QuantiseBlock block = QuantiseBlock::row_128;
  ScaleLayout layout = ScaleLayout::matrix;
  ConstTensor codes = {};   ///< fp8_e4m3 [rows,width] or [E,rows,width]
  ConstTensor scales = {};  ///< fp32 for blocks of 128, e8m0 for blocks of 32
  Tensor values = {};       ///< fp32 or bf16, the shape of codes
};

/// values = code * scale, rounded to fp32, then to bf16 where that is what `values` holds. All tensors are contiguous.
/// Errors: invalid_argument as of quantise(); unsupported on cuda.
TESSERA_EXPORT Status dequantise(Context const& context, DequantiseArgs const& args) noexcept;

/// Expert weights as the low-precision GEMMs read them, whatever MoeDesc::layout says: gate before up, k contiguous.
/// w = 2 for gated activations, 1 otherwise. fp8-block (square_128) has one quantisation and its transpose; mxfp8
/// two, of the same weights, in blocks along d and along n. All contiguous.
struct QuantisedWeights {
  Tensor up = {};               ///< [E,w,n,d]
  Tensor up_transposed = {};    ///< [E,d,w*n]; absent: not made
  Tensor down = {};             ///< [E,d,n]
  Tensor down_transposed = {};  ///< [E,n,d]; absent: not made
  /// fp8-block: fp32 [E,n/128,d/128,w], so that gate and up of a block stand together. mxfp8: e8m0 atoms
  /// [E,w,scale_atom_bytes(n, d/32)].
  Tensor up_scales = {};
  Tensor down_scales = {};  ///< fp32 [E,d/128,n/128]; e8m0 atoms [E,scale_atom_bytes(d, n/32)]
  /// mxfp8, with the transposed codes: atoms [E,scale_atom_bytes(d, w*n/32)] and [E,scale_atom_bytes(n, d/32)].
  /// fp8-block reads up_scales and down_scales with the indices of a block exchanged.
  Tensor up_transposed_scales = {};
  Tensor down_transposed_scales = {};
};

/// Quantises the weights of `desc` (any layout; biases are not read): ScaleRule fp32 and pow2 make fp8-block, rceil and
/// floor mxfp8. What a layer with MoeDesc::weight_codes reads is made by scale_rule(desc); that field of `desc` and its
/// precision say nothing here. On a GPU fp8-block alone, for descs that precision fp8 is served of, enqueued on
/// `stream`. Errors: invalid_argument for d or n that are no multiples of 128 (mxfp8: of 32) and tensors that do not
/// fit; on a GPU unsupported for mxfp8, whose layers make their codes in every call, and for weights or codes that do
/// not lie at multiples of 16 bytes.
TESSERA_EXPORT Status quantise_weights(Context const& context, MoeDesc const& desc,
                                       ExpertWeights const& weights, ScaleRule rule,
                                       QuantisedWeights const& out, Stream stream = {}) noexcept;

}  // namespace tessera
