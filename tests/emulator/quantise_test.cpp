// SPDX-License-Identifier: Apache-2.0
// The quantisers of one GPU, from the source that GPUs get: the codes and scales of core/fp8.hpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/kernels/quantise.cuh"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using core::BlockScale;
using core::E4m3;
using emulator::Bits;
using emulator::Memory;

constexpr std::int64_t kBlock = 128;

// Every 13th bf16 value, infinities and NaN among them, is once the largest of its block of a row.
Bits value_at(std::int64_t row, std::int64_t column) {
  auto const largest = static_cast<Bits>(row * 13);
  if (column % kBlock == row % kBlock) return largest;
  float const part = static_cast<float>((row * 31 + column * 17) % 129 - 64) / 65.0f;
  return emulator::round(emulator::widen(largest) * part);
}

// Of a block of values, each of which value(i) gives.
template <class Value>
BlockScale scale_of(Value value, std::int64_t count, bool pow2) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, core::fp32_bits(emulator::widen(value(i))) & 0x7fffffffu);
  }
  return pow2 ? core::pow2_scale(largest) : core::fp32_scale(largest);
}

void expect_scale(float have, BlockScale const& want) {
  EXPECT_TRUE(core::fp32_bits(have) == core::fp32_bits(want.scale) ||
              (have != have && want.scale != want.scale))
      << have << ", not " << want.scale;
}

void check_rows(bool pow2) {
  std::int64_t const rows = 65536 / 13, width = kBlock, pitch = width + 8;
  Memory<Bits> x(rows * pitch);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) x[r * pitch + c] = value_at(r, c);
  }
  Memory<E4m3> codes(rows * width);
  Memory<float> scales(rows);
  ASSERT_EQ(launch_quantise_rows_kernel({.gmem_x = x.get(),
                                         .rows = rows,
                                         .width = width,
                                         .pitch = pitch,
                                         .pow2 = pow2,
                                         .gmem_codes = codes.get(),
                                         .gmem_scales = scales.get()},
                                        nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 1, .burst = 64}), "");
  for (std::int64_t r = 0; r < rows; ++r) {
    BlockScale const scale =
        scale_of([&](std::int64_t c) { return x[r * pitch + c]; }, width, pow2);
    expect_scale(scales[r], scale);
    for (std::int64_t c = 0; c < width; ++c) {
      ASSERT_EQ(codes[r * width + c].bits,
                core::quantise(emulator::widen(x[r * pitch + c]), scale).bits)
          << "row " << r << ", column " << c;
    }
  }
}

TEST(Quantise, RowsHaveTheBytesOfTheCpu) { check_rows(false); }
TEST(Quantise, RowsWithPowersOfTwo) { check_rows(true); }

TEST(Quantise, RowsOfSeveralBlocks) {
  std::int64_t const rows = 5, width = 3 * kBlock;
  Memory<Bits> x(rows * width);
  emulator::fill(x.get(), rows * width, 5, 3.0f);
  Memory<E4m3> codes(rows * width + kBlock);  // and what must not be written
  Memory<float> scales(rows * 3 + 1);
  ASSERT_EQ(launch_quantise_rows_kernel({.gmem_x = x.get(),
                                         .rows = rows,
                                         .width = width,
                                         .pitch = width,
                                         .gmem_codes = codes.get(),
                                         .gmem_scales = scales.get()},
                                        nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 2}), "");
  for (std::int64_t b = 0; b < rows * 3; ++b) {
    BlockScale const scale =
        scale_of([&](std::int64_t i) { return x[b * kBlock + i]; }, kBlock, false);
    expect_scale(scales[b], scale);
    for (std::int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      ASSERT_EQ(codes[i].bits, core::quantise(emulator::widen(x[i]), scale).bits) << i;
    }
  }
  EXPECT_EQ(codes[rows * width].bits, 0xff);
  EXPECT_NE(scales[rows * 3], scales[rows * 3]);
}

void check_weights(int halves, std::int64_t rows, std::int64_t width, bool pow2) {
  int const experts = 2;
  std::int64_t const count = experts * halves * rows * width;
  Memory<Bits> w(count);
  emulator::fill(w.get(), count, 3, 0.1f);
  for (std::int64_t i = 0; i < count; i += 997)
    w[i] = emulator::round(0.3f + static_cast<float>(i % 7));
  for (std::int64_t c = 0; c < kBlock; ++c) {  // a block of zeros
    for (std::int64_t r = 0; r < kBlock; ++r) w[r * width + c] = static_cast<Bits>(c % 2 << 15);
  }
  Memory<E4m3> codes(count);
  Memory<float> scales(count / (kBlock * kBlock));
  ASSERT_EQ(launch_quantise_weights_kernel({.gmem_w = w.get(),
                                            .rows = rows,
                                            .width = width,
                                            .halves = halves,
                                            .experts = experts,
                                            .pow2 = pow2,
                                            .gmem_codes = codes.get(),
                                            .gmem_scales = scales.get()},
                                           nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 4}), "");
  for (std::int64_t m = 0; m < std::int64_t{experts} * halves; ++m) {
    for (std::int64_t r0 = 0; r0 < rows; r0 += kBlock) {
      for (std::int64_t c0 = 0; c0 < width; c0 += kBlock) {
        auto const at = [&](std::int64_t i) {
          return (m * rows + r0 + i / kBlock) * width + c0 + i % kBlock;
        };
        BlockScale const scale =
            scale_of([&](std::int64_t i) { return w[at(i)]; }, kBlock * kBlock, pow2);
        std::int64_t const block =
            (m / halves * (rows / kBlock) + r0 / kBlock) * (width / kBlock) + c0 / kBlock;
        expect_scale(scales[block * halves + m % halves], scale);
        for (std::int64_t i = 0; i < kBlock * kBlock; ++i) {
          ASSERT_EQ(codes[at(i)].bits, core::quantise(emulator::widen(w[at(i)]), scale).bits)
              << "matrix " << m << ", block " << r0 << ", " << c0;
        }
      }
    }
  }
}

TEST(Quantise, WeightsOfTheUpProjection) { check_weights(2, 2 * kBlock, kBlock, false); }
TEST(Quantise, WeightsOfTheDownProjection) { check_weights(1, kBlock, 3 * kBlock, true); }

TEST(Quantise, RefusesPartsOfABlock) {
  QuantiseRowsArguments rows = {};
  rows.rows = 1;
  rows.width = rows.pitch = 192;
  EXPECT_EQ(launch_quantise_rows_kernel(rows, nullptr), cudaErrorInvalidValue);
  QuantiseWeightsArguments weights = {};
  weights.rows = 192;
  weights.width = 128;
  weights.halves = weights.experts = 1;
  EXPECT_EQ(launch_quantise_weights_kernel(weights, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
