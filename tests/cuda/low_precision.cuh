// SPDX-License-Identifier: Apache-2.0
// What the tests of FP8 kernels on a GPU share: data, quantised on the CPU, and what sums of e4m3 products may be off
// by.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/bf16.hpp"
#include "core/fp8.hpp"
#include "core/thread_pool.hpp"
#include "cpu/parallel/quantise.hpp"
#include "device_buffer.cuh"
#include "tests/emulator/e4m3_sum.hpp"

namespace tessera::cuda_test {

using core::Bf16;
using core::E4m3;

constexpr int kBlock = 128;

inline int failures = 0;
inline void expect(bool good, std::string const& what) {
  if (good) return;
  if (++failures < 20) std::printf("FAILED: %s\n", what.c_str());
}

inline float spread(int64_t row, int64_t block) {
  return std::ldexp(1.0f, int((5 * row + 3 * block) % 7) - 3);
}
inline float noise(int64_t i, int seed) {
  return float((i * 7919 + seed * 104729) % 20011 - 10005) / 10005.0f;
}
inline bool nan_or_equal(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || core::fp32_bits(a) == core::fp32_bits(b);
}

struct Quantised {
  std::vector<E4m3> codes;
  std::vector<float> scales;
};

inline Quantised on_cpu(std::vector<Bf16> const& values, int64_t rows, int64_t width, int64_t pitch,
                        bool is_square, bool pow2) {
  int64_t const block_rows = is_square ? kBlock : 1;
  Quantised out{std::vector<E4m3>(size_t(rows * width)),
                std::vector<float>(size_t(rows / block_rows * (width / kBlock)))};
  core::ThreadPool pool(4);
  cpu::quantise<Bf16>({.block = is_square ? QuantiseBlock::square_128 : QuantiseBlock::row_128,
                       .rule = pow2 ? ScaleRule::pow2 : ScaleRule::fp32,
                       .rows = rows,
                       .width = width,
                       .values = {.first = {.data = values.data(), .row_stride = pitch}},
                       .codes = out.codes.data(),
                       .code_pitch = width,
                       .scales = {.data = out.scales.data(), .row_stride = width / kBlock}},
                      pool);
  return out;
}

// (E,halves,rows,width), scales (E,rows/128,width/128,halves).
struct Weights {
  int experts, halves, rows, width;
  std::vector<Bf16> values;
  Quantised quantised;
};

inline Weights make_weights(int experts, int halves, int rows, int width, bool pow2) {
  int64_t const all_rows = int64_t{experts} * halves * rows;
  Weights w{experts, halves, rows, width, std::vector<Bf16>(size_t(all_rows * width)), {}};
  for (int64_t row = 0; row < all_rows; ++row) {
    for (int64_t c = 0; c < width; ++c) {
      w.values[size_t(row * width + c)] = core::round_to<Bf16>(noise(row * width + c, 2) * 0.05f *
                                                               spread(row / kBlock, c / kBlock));
    }
  }
  Quantised plain = on_cpu(w.values, all_rows, width, width, true, pow2);
  w.quantised.codes = std::move(plain.codes);
  w.quantised.scales.resize(plain.scales.size());
  int const down = rows / kBlock, across = width / kBlock;
  for (int e = 0; e < experts; ++e) {
    for (int half = 0; half < halves; ++half) {
      for (int i = 0; i < down; ++i) {
        for (int k = 0; k < across; ++k) {
          w.quantised.scales[size_t(((e * down + i) * across + k) * halves + half)] =
              plain.scales[size_t(((e * halves + half) * down + i) * across + k)];
        }
      }
    }
  }
  return w;
}

// Products of one element of a row, in their order: their sum in fp64, what the kernel may be off by, and what tensor
// cores make of them as far as is known.
class Sum {
 public:
  void add(float product, float scale) {
    products_[count_ % emulator::kE4m3Products] = product;
    sum_ += double{product} * scale;
    if (++count_ % emulator::kE4m3Products == 0) add_products(std::fabs(double{scale}));
    if (count_ % kBlock == 0) {
      modelled_ = std::fma(block_, scale, modelled_);
      block_ = 0;
    }
  }
  double value() const { return sum_; }
  double allowance() const { return allowance_ + std::fabs(sum_) * 0x1p-8; }
  Bf16 modelled() const { return core::round_to<Bf16>(modelled_); }

 private:
  // 33 numbers are cut at 13 fraction bits of the largest, and the sum, which may be larger, at 13 of its own.
  void add_products(double scale) {
    double largest = std::fabs(double{block_});
    for (float const p : products_) largest = std::max(largest, std::fabs(double{p}));
    allowance_ += (emulator::kE4m3Products + 4) * 0x1p-13 * largest * scale;
    block_ = emulator::add_e4m3_products(block_, products_);
  }

  float products_[emulator::kE4m3Products];
  double sum_ = 0, allowance_ = 0;
  float block_ = 0, modelled_ = 0;
  int count_ = 0;
};
// The errors of a row together, of its norm: a rounding to bf16 makes 1.7e-3 of them, random cuts little more.
class RowError {
 public:
  explicit RowError(double limit = 3e-3) : limit_(limit) {}
  void add(double have, double sum) {
    errors_ += (have - sum) * (have - sum);
    squares_ += sum * sum;
  }
  bool good() const { return std::isnan(squares_) || errors_ <= limit_ * limit_ * squares_; }

 private:
  double limit_, errors_ = 0, squares_ = 0;
};

}  // namespace tessera::cuda_test
