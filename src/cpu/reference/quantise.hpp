// SPDX-License-Identifier: Apache-2.0
// Quantising as docs/numerics.md defines it, in fp64 arithmetic on values: nothing here knows a bit of a code.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/low_precision.hpp"

namespace tessera::reference {

using Values = std::vector<double>;

/// The e4m3 value nearest to `value`, of two equally near the one whose mantissa is even; 448 at most. NaN stays NaN.
double to_e4m3(double value);

/// `value` rounded to fp32, then to bf16.
double to_bf16(double value);

/// Elements that share a scale.
struct Block {
  std::int64_t rows = 1, columns = 1;
};

/// A block's scale, and what its elements are multiplied by.
struct Scale {
  double scale = 1, inverse = 1;
};
/// The scale of a block whose largest magnitude is `largest` (infinity or NaN where it holds one). Any rule serves
/// blocks of any size.
Scale scale_of(double largest, ScaleRule rule);

/// A matrix of codes, as their values, and of scales.
struct Quantised {
  std::int64_t rows = 0, width = 0;
  Block block;
  Values codes;   ///< [rows,width]
  Values scales;  ///< [rows/block.rows, width/block.columns]

  [[nodiscard]] std::int64_t scale_index(std::int64_t row, std::int64_t column) const {
    return row / block.rows * (width / block.columns) + column / block.columns;
  }
};
/// `values` hold fp32 (or bf16) numbers.
Quantised quantise(Values const& values, std::int64_t rows, std::int64_t width, Block block,
                   ScaleRule rule);
/// code * scale, not rounded.
Values dequantised(Quantised const& quantised);

}  // namespace tessera::reference
