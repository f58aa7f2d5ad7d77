// SPDX-License-Identifier: Apache-2.0
// Operands of GEMMs of MXFP8, quantised from values whose rows and blocks differ in size, and the sums that a result is
// compared with: bit for bit those of the emulated tensor cores, which add 32 products in order, then scale them, and
// within fp32's rounding of fp64 sums of the dequantised operands.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "tessera/low_precision.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::emulator {

constexpr int kMxColumns = 32;

// 32 values as codes and a scale.
struct MxBlock {
  explicit MxBlock(float const (&values)[kMxColumns]) {
    std::uint32_t largest = 0;
    for (float const v : values) {
      largest = std::max(largest, core::fp32_bits(v) & 0x7fffffffu);
    }
    scale = core::e8m0_scale(largest, false);
    for (int c = 0; c < kMxColumns; ++c) {
      codes[c] = core::quantise(values[c], core::block_scale(scale));
    }
  }
  // What is wrong with codes and a scale in memory, or nothing.
  std::string differs(core::E4m3 const* stored, std::uint8_t stored_scale) const {
    if (stored_scale != scale.bits) {
      return "the scale " + std::to_string(stored_scale) + " instead of " +
             std::to_string(scale.bits);
    }
    for (int c = 0; c < kMxColumns; ++c) {
      if (stored[c].bits != codes[c].bits) return "another code in column " + std::to_string(c);
    }
    return "";
  }
  core::E4m3 codes[kMxColumns];
  core::E8m0 scale;
};

// Which kind of scales a matrix has: words of its rows' blocks, or atoms of 128 rows.
enum class MxScales { words, atoms };

// `matrices` of rows x width, codes behind each other, scales behind each other.
class MxMatrix {
 public:
  MxMatrix(std::int64_t matrices, std::int64_t rows, std::int64_t width, MxScales kind, int seed,
           float size, bool has_nan = false)
      : rows_(rows), width_(width), kind_(kind) {
    std::mt19937 rng(static_cast<unsigned>(seed));
    std::uniform_real_distribution<float> draw(-size, size);
    for (std::int64_t row = 0; row < matrices * rows; ++row) {
      for (std::int64_t block = 0; block < blocks(); ++block) {
        // Rows and blocks have sizes of their own, so that another's scale shows.
        float const spread = std::ldexp(1.0f, static_cast<int>((5 * row + 3 * block) % 7) - 3);
        float values[kMxColumns];
        for (float& v : values) v = draw(rng) * spread;
        if (row == 4 && block == 0) {
          for (float& v : values) v = std::copysign(0.0f, v);
        }
        if (has_nan && row == 9 && block == 1) values[17] = std::nanf("");
        MxBlock const quantised(values);
        scales_[scale_at(row, block)] = quantised.scale.bits;
        for (int c = 0; c < kMxColumns; ++c) {
          codes_[row * width + block * kMxColumns + c] = quantised.codes[c];
        }
      }
    }
    for (std::int64_t i = 0; i < matrices * rows * width; ++i) {
      floats_.push_back(core::to_fp32(codes_[i]));
    }
    for (std::int64_t row = 0; row < matrices * rows; ++row) {
      for (std::int64_t block = 0; block < blocks(); ++block) {
        factors_.push_back(core::to_fp32(core::E8m0{scales_[scale_at(row, block)]}));
      }
    }
  }

  core::E4m3* codes() const { return codes_.get(); }
  std::uint8_t* scales() const { return scales_.get(); }
  std::int64_t blocks() const { return width_ / kMxColumns; }
  std::int64_t width() const { return width_; }
  // Of a row, counted through all matrices.
  float const* floats(std::int64_t row) const {
    return &floats_[static_cast<std::size_t>(row * width_)];
  }
  float const* factors(std::int64_t row) const {
    return &factors_[static_cast<std::size_t>(row * blocks())];
  }

 private:
  std::int64_t matrix_bytes() const {
    return kind_ == MxScales::words ? rows_ * blocks() : scale_atom_bytes(rows_, blocks());
  }
  std::int64_t scale_at(std::int64_t row, std::int64_t block) const {
    std::int64_t const own = row % rows_;
    return row / rows_ * matrix_bytes() + (kind_ == MxScales::words
                                               ? own * blocks() + block
                                               : scale_atom_offset(own, block, blocks()));
  }

  std::int64_t rows_, width_;
  MxScales kind_;
  // Enough for any shape here; what is not written is NaN.
  Memory<core::E4m3> codes_{std::int64_t{1} << 21};
  Memory<std::uint8_t> scales_{std::int64_t{1} << 17};
  std::vector<float> floats_, factors_;
};

// The products of a row of A and a row of B.
struct MxSum {
  float value = 0;   // as the emulated tensor cores add
  double exact = 0;  // of the dequantised operands
  double size = 0;   // of magnitudes
  std::int64_t count;

  MxSum(MxMatrix const& a, std::int64_t a_row, MxMatrix const& b, std::int64_t b_row)
      : count(a.width()) {
    float const *x = a.floats(a_row), *w = b.floats(b_row);
    float const *x_scale = a.factors(a_row), *w_scale = b.factors(b_row);
    for (std::int64_t block = 0; block < a.blocks(); ++block) {
      float part = 0;
      double part_exact = 0, part_size = 0;
      for (int c = 0; c < kMxColumns; ++c) {
        float const product = *x++ * *w++;  // exact
        part += product;
        part_exact += product;
        part_size += std::fabs(product);
      }
      double const scale = double{x_scale[block]} * w_scale[block];
      value += part * (x_scale[block] * w_scale[block]);
      exact += part_exact * scale;
      size += part_size * scale;
    }
  }

  bool is_nan() const { return std::isnan(exact); }
  // fp32 roundings alone.
  bool agrees_with_fp64() const {
    return is_nan() ? std::isnan(value)
                    : std::fabs(value - exact) <= size * static_cast<double>(count) * 0x1p-24;
  }
  // Rounded to bf16 as well.
  bool agrees_with_fp64(Bits rounded) const {
    if (is_nan()) return std::isnan(widen(rounded));
    double const allowed = std::fabs(exact) * 0x1p-8 + size * static_cast<double>(count) * 0x1p-24;
    return std::fabs(widen(rounded) - exact) <= allowed;
  }
};

inline bool same(Bits left, Bits right) {
  return left == right || (std::isnan(widen(left)) && std::isnan(widen(right)));
}

// Shapes that every kernel is tested with: all rows one expert's, experts of any rows, no rows but a few of no expert.
inline Shape mx_one_expert() {
  return {.rows = {0, 70, 0}, .hidden = 128, .intermediate = 128, .ctas = 1};
}
inline Shape mx_any_rows() {
  return {.rows = {0, 1, 64, 0, 127, 129, 300, 0}, .hidden = 128, .intermediate = 128, .ctas = 3};
}
inline Shape mx_no_rows() {
  return {.rows = {0, 0}, .hidden = 128, .intermediate = 128, .other_rows = 5};
}

// d or n is no multiple of a tile's 128.
template <class Projection, class Config>
void expect_parts_of_a_tile_refused() {
  for (auto const& [d, n] : {std::pair{192, 128}, {128, 96}}) {
    Projection projection({.rows = {1}, .hidden = d, .intermediate = n});
    EXPECT_EQ(projection.template launch<Config>(), cudaErrorInvalidValue);
  }
}

// Extents are multiples of 128.
constexpr AtRandom kMxAtRandom{
    .gated = true, .unit = 128, .hidden = 4, .intermediate = 2, .count = 50};

}  // namespace tessera::emulator
