// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of e4m3 operands, from the source that GPUs get: bit for bit 128 products in the order of n, then
// blocks of them by one FMA each with the product of their scales, rounded to bf16.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/kernels/down_projection_fwd_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "tests/emulator/e4m3_sum.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using core::E4m3;
using emulator::Bits;
using emulator::Memory;

constexpr std::int64_t kBlock = 128, kRowsPast = 3;

// A code of small magnitude, and a scale, of its own for each index.
E4m3 code_at(std::int64_t i) {
  return {static_cast<std::uint8_t>((i * 37 + i / 128 * 11) % 96 | (i * 7919 >> 5 & 1) << 7)};
}
float scale_at(std::int64_t i) {
  return std::ldexp(1.0f + 0.125f * static_cast<float>(i % 5), static_cast<int>(i * 3 % 7) - 5);
}

class Problem {
 public:
  Problem(std::vector<int> const& rows, std::int64_t d, std::int64_t n)
      : d_(d), n_(n), experts_(static_cast<std::int64_t>(rows.size())), offsets_(experts_ + 1) {
    for (std::int64_t e = 0; e < experts_; ++e) {
      offsets_[e] = static_cast<std::int32_t>(rows_);
      rows_ += rows[static_cast<std::size_t>(e)];
    }
    offsets_[experts_] = static_cast<std::int32_t>(rows_);
    for (std::int64_t i = 0; i < rows_ * n_; ++i) a_[i] = code_at(i);
    for (std::int64_t i = 0; i < n_ / kBlock * pitch(); ++i) a_scales_[i] = scale_at(i);
    for (std::int64_t i = 0; i < experts_ * d_ * n_; ++i) w_[i] = code_at(5 * i + 2);
    for (std::int64_t i = 0; i < experts_ * d_ * n_ / (kBlock * kBlock); ++i) {
      w_scales_[i] = scale_at(3 * i + 1);
    }
  }

  void check(emulator::Schedule const& schedule) const {
    Memory<Bits> y(capacity() * d_);
    DownProjectionFwdE4m3Arguments args = {};
    args.gmem_a = a_.get();
    args.gmem_a_scales = a_scales_.get();
    args.gmem_expert_offsets = offsets_.get();
    args.gmem_w_down = w_.get();
    args.gmem_w_down_scales = w_scales_.get();
    args.gmem_y = y.get();
    args.rows = capacity();
    args.hidden = d_;
    args.intermediate = n_;
    args.experts = static_cast<std::int32_t>(experts_);
    args.gmem_tile_counter = counter_.get();
    ASSERT_EQ(launch_down_projection_fwd_e4m3_config<DownProjectionFwdE4m3Config>(args, 2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "");
    std::int64_t expert = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      while (r >= offsets_[expert + 1]) ++expert;
      for (std::int64_t c = 0; c < d_; ++c) {
        ASSERT_EQ(y[r * d_ + c], emulator::round(sum(r, expert, c)))
            << "y row " << r << ", column " << c;
      }
    }
    for (std::int64_t i = rows_ * d_; i < capacity() * d_; ++i)
      ASSERT_EQ(y[i], 0xffff) << "past the last row";
    ASSERT_EQ(counter_[0], 0);
  }

 private:
  std::int64_t capacity() const { return rows_ + kRowsPast; }
  std::int64_t pitch() const { return padded_scale_rows(capacity()); }

  float sum(std::int64_t row, std::int64_t expert, std::int64_t column) const {
    float all = 0;
    for (std::int64_t block = 0; block < n_ / kBlock; ++block) {
      float partial = 0;
      for (std::int64_t step = block * kBlock; step < (block + 1) * kBlock;
           step += emulator::kE4m3Products) {
        float products[emulator::kE4m3Products];
        for (int j = 0; j < emulator::kE4m3Products; ++j) {
          products[j] = core::to_fp32(a_[row * n_ + step + j]) *
                        core::to_fp32(w_[(expert * d_ + column) * n_ + step + j]);
        }
        partial = emulator::add_e4m3_products(partial, products);
      }
      std::int64_t const of_w = (expert * (d_ / kBlock) + column / kBlock) * (n_ / kBlock) + block;
      all = std::fma(partial, a_scales_[block * pitch() + row] * w_scales_[of_w], all);
    }
    return all;
  }

  std::int64_t d_, n_, experts_, rows_ = 0;
  Memory<std::int32_t> offsets_;
  Memory<E4m3> a_{300 * 1024};
  Memory<float> a_scales_{300 * 8};
  Memory<E4m3> w_{experts_ * d_ * n_};
  Memory<float> w_scales_{experts_ * d_ * n_ / (kBlock * kBlock)};
  Memory<std::int32_t> counter_{1, 0};
};

// Fewer k_tiles than half of the pieces, and more; tiles without rows, of 1, 64 and 65 rows; several n_tiles.
TEST(DownProjectionFwdE4m3, ShortRows) {
  Problem const p({65, 0, 129, 1, 64}, 512, 128);
  for (emulator::Schedule const& schedule :
       {emulator::Schedule{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}}) {
    ASSERT_NO_FATAL_FAILURE(p.check(schedule)) << schedule.seed;
  }
}

TEST(DownProjectionFwdE4m3, LongRows) {
  ASSERT_NO_FATAL_FAILURE(Problem({70, 3, 150}, 256, 768).check({.seed = 4}));
  ASSERT_NO_FATAL_FAILURE(Problem({130}, 256, 1024).check({.seed = 5}));
}

TEST(DownProjectionFwdE4m3, RefusesPartsOfATile) {
  DownProjectionFwdE4m3Arguments args = {};
  args.hidden = 384;
  args.intermediate = 128;
  EXPECT_EQ(launch_down_projection_fwd_e4m3_config<DownProjectionFwdE4m3Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
