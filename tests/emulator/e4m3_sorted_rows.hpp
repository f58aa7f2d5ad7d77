// SPDX-License-Identifier: Apache-2.0
// Sorted rows of codes times weights of codes, with scales of each block of 128, as down_projection_fwd and
// up_projection_dgrad multiply them: bit for bit 128 products in the order of k, then blocks of them by one FMA each
// with the product of their scales, rounded to bf16.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/host/low_precision.hpp"
#include "tests/emulator/e4m3_sum.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::emulator {

class SortedRowsE4m3 {
 public:
  static constexpr std::int64_t kBlock = 128, kRowsPast = 3;

  // rows: of each expert.
  SortedRowsE4m3(std::vector<int> const& rows, std::int64_t columns, std::int64_t k)
      : columns_(columns),
        k_(k),
        experts_(static_cast<std::int64_t>(rows.size())),
        offsets_(experts_ + 1) {
    for (std::int64_t e = 0; e < experts_; ++e) {
      offsets_[e] = static_cast<std::int32_t>(rows_);
      rows_ += rows[static_cast<std::size_t>(e)];
    }
    offsets_[experts_] = static_cast<std::int32_t>(rows_);
    for (std::int64_t i = 0; i < rows_ * k_; ++i) a_[i] = code_at(i);
    for (std::int64_t i = 0; i < k_ / kBlock * pitch(); ++i) a_scales_[i] = scale_at(i);
    for (std::int64_t i = 0; i < experts_ * columns_ * k_; ++i) w_[i] = code_at(5 * i + 2);
    for (std::int64_t i = 0; i < experts_ * columns_ * k_ / (kBlock * kBlock); ++i) {
      w_scales_[i] = scale_at(3 * i + 1);
    }
  }

  core::E4m3 const* a() const { return a_.get(); }
  float const* a_scales() const { return a_scales_.get(); }
  core::E4m3 const* w() const { return w_.get(); }  // (E,columns,k)
  float const* w_scales() const { return w_scales_.get(); }
  std::int32_t const* offsets() const { return offsets_.get(); }
  std::int32_t* counter() const { return counter_.get(); }
  std::int64_t capacity() const { return rows_ + kRowsPast; }
  int experts() const { return static_cast<int>(experts_); }

  // launch(gmem_d) queues the kernel, with d (capacity,columns) in bf16.
  template <class Launch>
  void check(Launch launch, Schedule const& schedule) const {
    Memory<Bits> d(capacity() * columns_);
    ASSERT_EQ(launch(d.get()), cudaSuccess);
    ASSERT_EQ(run(schedule), "");
    std::int64_t expert = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      while (r >= offsets_[expert + 1]) ++expert;
      for (std::int64_t c = 0; c < columns_; ++c) {
        ASSERT_EQ(d[r * columns_ + c], round(sum(r, expert, c))) << "row " << r << ", column " << c;
      }
    }
    for (std::int64_t i = rows_ * columns_; i < capacity() * columns_; ++i)
      ASSERT_EQ(d[i], 0xffff) << "past the last row";
    ASSERT_EQ(counter_[0], 0);
  }

 private:
  // A code of small magnitude, and a scale, of its own for each index.
  static core::E4m3 code_at(std::int64_t i) {
    return {static_cast<std::uint8_t>((i * 37 + i / 128 * 11) % 96 | (i * 7919 >> 5 & 1) << 7)};
  }
  static float scale_at(std::int64_t i) {
    return std::ldexp(1.0f + 0.125f * static_cast<float>(i % 5), static_cast<int>(i * 3 % 7) - 5);
  }
  std::int64_t pitch() const { return padded_scale_rows(capacity()); }

  float sum(std::int64_t row, std::int64_t expert, std::int64_t column) const {
    float all = 0;
    for (std::int64_t block = 0; block < k_ / kBlock; ++block) {
      float partial = 0;
      for (std::int64_t step = block * kBlock; step < (block + 1) * kBlock; step += kE4m3Products) {
        float products[kE4m3Products];
        for (int j = 0; j < kE4m3Products; ++j) {
          products[j] = core::to_fp32(a_[row * k_ + step + j]) *
                        core::to_fp32(w_[(expert * columns_ + column) * k_ + step + j]);
        }
        partial = add_e4m3_products(partial, products);
      }
      std::int64_t const of_w =
          (expert * (columns_ / kBlock) + column / kBlock) * (k_ / kBlock) + block;
      all = std::fma(partial, a_scales_[block * pitch() + row] * w_scales_[of_w], all);
    }
    return all;
  }

  std::int64_t columns_, k_, experts_, rows_ = 0;
  Memory<std::int32_t> offsets_;
  Memory<core::E4m3> a_{300 * 1024};
  Memory<float> a_scales_{300 * 8};
  Memory<core::E4m3> w_{experts_ * columns_ * k_};
  Memory<float> w_scales_{experts_ * columns_ * k_ / (kBlock * kBlock)};
  Memory<std::int32_t> counter_{1, 0};
};

}  // namespace tessera::emulator
