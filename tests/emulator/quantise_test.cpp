// SPDX-License-Identifier: Apache-2.0
// The quantisers of one GPU, from the source that GPUs get: the codes and scales of core/fp8.hpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
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

// Weights (E,halves,rows,width) of a layout: as they are, in rows of gate and up in turns, in blocks of 64 of either,
// or transposed.
enum class Layout { rows, interleaved, blocked, transposed };

struct WeightCase {
  int halves;
  std::int64_t rows, width;
  bool pow2;
  Layout layout;
  bool codes, transposed;  ///< what is stored
};

// Half `half` of one [halves*rows,width] matrix, or its transpose, for each expert.
WeightRows half_of(WeightCase const& c, Bits const* gmem, int half) {
  WeightRows w{.gmem = gmem + half * c.rows * c.width,
               .expert_stride = c.halves * c.rows * c.width,
               .row_stride = c.width,
               .column_stride = 1,
               .block = c.rows};
  switch (c.layout) {
    case Layout::rows:
      break;
    case Layout::interleaved:
      w.gmem = gmem + half * c.width;
      w.row_stride = c.halves * c.width;
      break;
    case Layout::blocked:
      w.gmem = gmem + half * 64 * c.width;
      w.block = 64;
      w.block_stride = c.halves * 64 * c.width;
      break;
    case Layout::transposed:
      w.gmem = gmem + half * c.rows;
      w.row_stride = 1;
      w.column_stride = c.halves * c.rows;
      break;
  }
  return w;
}

void check_weights(WeightCase const& c) {
  int const experts = 2, halves = c.halves;
  std::int64_t const rows = c.rows, width = c.width, count = experts * halves * rows * width;
  Memory<Bits> w(count);
  emulator::fill(w.get(), count, 3, 0.1f);
  for (std::int64_t i = 0; i < count; i += 997)
    w[i] = emulator::round(0.3f + static_cast<float>(i % 7));
  WeightRows const parts[2] = {half_of(c, w.get(), 0), half_of(c, w.get(), 1)};
  auto const value = [&](int expert, int half, std::int64_t r, std::int64_t k) -> Bits& {
    WeightRows const& part = parts[half];
    return const_cast<Bits*>(
        static_cast<Bits const*>(part.gmem))[part.row_offset(expert, r) + k * part.column_stride];
  };
  for (std::int64_t k = 0; k < kBlock; ++k) {  // a block of zeros
    for (std::int64_t r = 0; r < kBlock; ++r) value(0, 0, r, k) = static_cast<Bits>(k % 2 << 15);
  }
  Memory<E4m3> codes(count), transposed(count);
  Memory<float> scales(count / (kBlock * kBlock)), turned_scales(count / (kBlock * kBlock));
  ASSERT_EQ(launch_quantise_weights_kernel(
                {.w = {parts[0], parts[1]},
                 .rows = rows,
                 .width = width,
                 .halves = halves,
                 .experts = experts,
                 .pow2 = c.pow2,
                 .gmem_codes = c.codes ? codes.get() : nullptr,
                 .gmem_codes_t = c.transposed ? transposed.get() : nullptr,
                 .gmem_scales = scales.get(),
                 .gmem_scales_t = c.transposed ? turned_scales.get() : nullptr},
                nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 4}), "");
  for (int e = 0; e < experts; ++e) {
    for (int half = 0; half < halves; ++half) {
      for (std::int64_t r0 = 0; r0 < rows; r0 += kBlock) {
        for (std::int64_t c0 = 0; c0 < width; c0 += kBlock) {
          auto const at = [&](std::int64_t i) {
            return value(e, half, r0 + i / kBlock, c0 + i % kBlock);
          };
          BlockScale const scale = scale_of(at, kBlock * kBlock, c.pow2);
          std::int64_t const block =
              (e * (rows / kBlock) + r0 / kBlock) * (width / kBlock) + c0 / kBlock;
          expect_scale(scales[block * halves + half], scale);
          if (c.transposed) {
            std::int64_t const turned =
                (e * (width / kBlock) + c0 / kBlock) * halves * (rows / kBlock) +
                half * (rows / kBlock) + r0 / kBlock;
            expect_scale(turned_scales[turned], scale);
          }
          for (std::int64_t i = 0; i < kBlock * kBlock; ++i) {
            std::int64_t const r = r0 + i / kBlock, k = c0 + i % kBlock;
            unsigned const want = core::quantise(emulator::widen(at(i)), scale).bits;
            // What is not stored keeps what Memory fills it with.
            ASSERT_EQ(codes[((e * halves + half) * rows + r) * width + k].bits,
                      c.codes ? want : 0xff)
                << "expert " << e << ", half " << half << ", row " << r << ", column " << k;
            ASSERT_EQ(transposed[(e * width + k) * halves * rows + half * rows + r].bits,
                      c.transposed ? want : 0xff)
                << "transposed; expert " << e << ", half " << half << ", row " << r << ", column "
                << k;
          }
        }
      }
    }
  }
}

TEST(Quantise, TurnedScalesAreThoseOfTheTranspose) {
  constexpr int kExperts = 3, kDown = 2, kAcross = 5;
  for (int const halves : {1, 2}) {
    std::int64_t const count = kExperts * kDown * kAcross * halves;
    Memory<float> scales(count), turned(count + 1);
    for (std::int64_t i = 0; i < count; ++i) scales[i] = static_cast<float>(i);
    ASSERT_EQ(launch_turn_scales_kernel({.gmem_scales = scales.get(),
                                         .gmem_scales_t = turned.get(),
                                         .down = kDown,
                                         .across = kAcross,
                                         .halves = halves,
                                         .experts = kExperts},
                                        nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run({.seed = 5}), "");
    std::int64_t next = 0;
    for (int e = 0; e < kExperts; ++e) {
      for (int column = 0; column < kAcross; ++column) {
        for (int half = 0; half < halves; ++half) {
          for (int row = 0; row < kDown; ++row) {
            EXPECT_EQ(turned[next++],
                      scales[((e * kDown + row) * kAcross + column) * halves + half]);
          }
        }
      }
    }
    EXPECT_NE(turned[count], turned[count]);  // not written
  }
}

TEST(Quantise, WeightsOfTheUpProjection) {
  check_weights({2, 2 * kBlock, kBlock, false, Layout::rows, true, false});
}
TEST(Quantise, WeightsOfTheDownProjection) {
  check_weights({1, kBlock, 3 * kBlock, true, Layout::rows, true, false});
}
TEST(Quantise, WeightsInBothOrientations) {
  check_weights({2, kBlock, 2 * kBlock, false, Layout::rows, true, true});
  check_weights({1, 2 * kBlock, kBlock, true, Layout::rows, false, true});
}
TEST(Quantise, WeightsThatAreStoredTransposed) {
  check_weights({2, kBlock, 2 * kBlock, false, Layout::transposed, true, true});
  check_weights({2, 2 * kBlock, kBlock, false, Layout::transposed, true, false});
  check_weights({1, kBlock, kBlock, false, Layout::transposed, false, true});
}
TEST(Quantise, WeightsOfGateAndUpInTurns) {
  check_weights({2, 2 * kBlock, kBlock, false, Layout::interleaved, true, true});
  check_weights({2, 2 * kBlock, kBlock, false, Layout::blocked, true, true});
}

// Codes of every value under scales of every size, one of them NaN, and what lies behind the last row.
TEST(Quantise, DequantisedRowsAreCodesTimesScales) {
  std::int64_t const rows = 37, kept = 35, width = 3 * kBlock, pitch = 40;
  Memory<E4m3> codes(rows * width);
  Memory<float> scales(pitch * 3);
  Memory<Bits> values(rows * width);
  for (std::int64_t i = 0; i < rows * width; ++i) {
    auto const code = static_cast<std::uint8_t>(i * 7 + i / width);
    codes[i] = {(code & 0x7f) == 0x7f ? std::uint8_t{0x7e} : code};
  }
  for (std::int64_t i = 0; i < pitch * 3; ++i) {
    scales[i] = std::ldexp(1.0f + static_cast<float>(i % 11) / 11, static_cast<int>(i % 40) - 20);
  }
  scales[pitch + 9] = std::numeric_limits<float>::quiet_NaN();
  auto const num_rows = static_cast<std::int32_t>(kept);
  for (bool const by_columns : {true, false}) {
    ASSERT_EQ(launch_dequantise_rows_kernel({.gmem_codes = codes.get(),
                                             .gmem_scales = scales.get(),
                                             .row_step = by_columns ? 1 : 3,
                                             .block_step = by_columns ? pitch : 1,
                                             .rows = rows,
                                             .width = width,
                                             .gmem_num_rows = &num_rows,
                                             .gmem_values = values.get()},
                                            nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run({.seed = 3}), "");
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < width; ++k) {
        Bits const have = values[r * width + k];
        if (r >= kept) {
          ASSERT_EQ(have, 0xffff) << "row " << r << " is none";
          continue;
        }
        float const scale =
            by_columns ? scales[k / kBlock * pitch + r] : scales[r * 3 + k / kBlock];
        Bits const want = emulator::round(core::to_fp32(codes[r * width + k]) * scale);
        if (scale != scale) {
          ASSERT_NE(emulator::widen(have), emulator::widen(have))
              << "row " << r << ", column " << k;
        } else {
          ASSERT_EQ(have, want) << "row " << r << ", column " << k;
        }
      }
    }
  }
}

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
