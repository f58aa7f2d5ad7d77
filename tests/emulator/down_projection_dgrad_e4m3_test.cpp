// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of e4m3 operands, from the source that GPUs get. t has the bits of 128 products in the order of
// d, then blocks of them by one FMA each; everything that is stored is held against fp64 on t and on the values of h's
// codes, and codes of dh are those that core/fp8.hpp makes of the dh in bf16.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/kernels/down_projection_dgrad_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "tests/emulator/e4m3_sum.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using core::BlockScale;
using core::E4m3;
using emulator::Bits;
using emulator::Memory;

constexpr std::int64_t kBlock = 128, kTokens = 50, kRowsPast = 5;
constexpr std::int64_t kNanRow = 7;  // a scale of its first block of gate is NaN

// A code of small magnitude, and a scale, of its own for each index.
E4m3 code_at(std::int64_t i) {
  return {static_cast<std::uint8_t>((i * 37 + i / 128 * 11) % 96 | (i * 7919 >> 5 & 1) << 7)};
}
float scale_at(std::int64_t i, int least) {
  return std::ldexp(1.0f + 0.125f * static_cast<float>(i % 5), static_cast<int>(i * 3 % 5) + least);
}

// |value - want| as far as rounding to bf16 and an error of the sigmoid of 2^-12 explain it; `slack` is what that error
// is multiplied by.
void expect_near(double value, double want, double slack, std::string const& where) {
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(value)) << where;
    return;
  }
  ASSERT_LE(std::fabs(value - want), std::fabs(want) * 0x1p-8 + slack * 0x1p-11 + 1e-30)
      << where << ": " << value << ", not " << want;
}

struct Outputs {
  bool dh = true, dh8 = true, a_scaled = true, partials = true;
  bool over_h = false;  // codes of dh take the place of those of h
};

class Problem {
 public:
  Problem(std::vector<int> const& rows, std::int64_t d, std::int64_t n)
      : d_(d), n_(n), experts_(static_cast<std::int64_t>(rows.size())), offsets_(experts_ + 1) {
    for (std::int64_t e = 0; e < experts_; ++e) {
      offsets_[e] = static_cast<std::int32_t>(rows_);
      rows_ += rows[static_cast<std::size_t>(e)];
    }
    offsets_[experts_] = static_cast<std::int32_t>(rows_);
    for (std::int64_t r = 0; r < rows_; ++r) {
      index_[r] = static_cast<std::int32_t>((7 * r + 3) % kTokens);
      permutation_[r] = static_cast<std::int32_t>(rows_ - 1 - r);
      scores_[r] = r % 11 == 5 ? 0.0f : 0.05f * static_cast<float>(r % 23) - 0.3f;
    }
    for (std::int64_t i = 0; i < kTokens * d_; ++i) d_o_[i] = code_at(i);
    for (std::int64_t i = 0; i < kTokens * d_ / kBlock; ++i) d_o_scales_[i] = scale_at(i, -5);
    for (std::int64_t i = 0; i < experts_ * n_ * d_; ++i) w_[i] = code_at(5 * i + 2);
    for (std::int64_t i = 0; i < experts_ * n_ * d_ / (kBlock * kBlock); ++i) {
      w_scales_[i] = scale_at(3 * i + 1, -6);
    }
    for (std::int64_t i = 0; i < rows_ * 2 * n_; ++i) h_[i] = code_at(3 * i + i / (2 * n_));
    for (std::int64_t block = 0; block < 2 * n_ / kBlock; ++block) {
      for (std::int64_t r = 0; r < rows_; ++r) {
        h_scales_[block * pitch() + r] = scale_at(7 * r + 6 * block, -6);
      }
    }
    if (kNanRow < rows_) h_scales_[kNanRow] = std::numeric_limits<float>::quiet_NaN();
  }

  void check(Outputs const& outputs, emulator::Schedule const& schedule) const {
    Memory<E4m3> h(capacity() * 2 * n_), dh8(capacity() * 2 * n_);
    // And a block more, which is not written.
    std::int64_t const blocks = 2 * n_ / kBlock;
    Memory<float> h_scales((blocks + 1) * pitch()), dh8_scales((blocks + 1) * pitch());
    std::memcpy(h.get(), h_.get(), static_cast<std::size_t>(rows_ * 2 * n_));
    std::memcpy(h_scales.get(), h_scales_.get(),
                static_cast<std::size_t>(blocks * pitch()) * sizeof(float));
    Memory<E4m3> const& codes = outputs.over_h ? h : dh8;
    Memory<float> const& scales = outputs.over_h ? h_scales : dh8_scales;
    Memory<Bits> dh(capacity() * 2 * n_), a(capacity() * n_);
    Memory<float> partials(capacity() * n_ / kBlock);
    DownProjectionDgradE4m3Arguments args = {};
    args.gmem_d_o = d_o_.get();
    args.gmem_d_o_scales = d_o_scales_.get();
    args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = offsets_.get();
    args.gmem_w_down_t = w_.get();
    args.gmem_w_down_t_scales = w_scales_.get();
    args.gmem_scores = scores_.get();
    args.gmem_sort_permutation = permutation_.get();
    args.gmem_h = h.get();
    args.gmem_h_scales = h_scales.get();
    args.activation = {.kind = ActivationKind::swiglu};
    if (outputs.dh) args.gmem_dh = dh.get();
    if (outputs.dh8) args.gmem_dh8 = codes.get();
    if (outputs.dh8) args.gmem_dh8_scales = scales.get();
    if (outputs.a_scaled) args.gmem_a_scaled = a.get();
    if (outputs.partials) args.gmem_ds_partials = partials.get();
    args.rows = capacity();
    args.hidden = d_;
    args.intermediate = n_;
    args.experts = static_cast<std::int32_t>(experts_);
    args.gmem_tile_counter = counter_.get();
    using Config = DownProjectionDgradE4m3Config<ActivationKind::swiglu>;
    ASSERT_EQ(launch_down_projection_dgrad_e4m3_config<Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "");
    std::int64_t expert = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      while (r >= offsets_[expert + 1]) ++expert;
      for (std::int64_t c0 = 0; c0 < n_; c0 += kBlock) {
        ASSERT_NO_FATAL_FAILURE(
            check_block(outputs, r, expert, c0, dh, codes, scales, a, partials));
      }
    }
    expect_untouched(outputs.dh ? rows_ : 0, 2 * n_, dh, "dh");
    expect_untouched(outputs.a_scaled ? rows_ : 0, n_, a, "a'");
    expect_untouched(outputs.partials ? rows_ : 0, n_ / kBlock, partials, "ds partials");
    if (!outputs.over_h) expect_untouched(outputs.dh8 ? rows_ : 0, 2 * n_, dh8, "codes of dh");
    for (std::int64_t block = outputs.over_h ? blocks : 0; block <= blocks; ++block) {
      for (std::int64_t r = outputs.dh8 && block < blocks ? rows_ : 0; r < pitch(); ++r) {
        ASSERT_EQ(core::fp32_bits(scales[block * pitch() + r]), 0xffffffffu)
            << "scale " << r << " of block " << block;
      }
    }
    ASSERT_EQ(counter_[0], 0);
  }

 private:
  std::int64_t capacity() const { return rows_ + kRowsPast; }
  std::int64_t pitch() const { return padded_scale_rows(capacity()); }

  template <class T>
  void expect_untouched(std::int64_t rows, std::int64_t width, Memory<T> const& memory,
                        char const* what) const {
    auto const* const bytes = reinterpret_cast<unsigned char const*>(memory.get() + rows * width);
    auto const count = static_cast<std::size_t>((capacity() - rows) * width) * sizeof(T);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bytes[i], 0xff) << what << " was written";
  }

  // Of one row and 128 columns of t, as gate and as up.
  void check_block(Outputs const& outputs, std::int64_t r, std::int64_t expert, std::int64_t c0,
                   Memory<Bits> const& dh, Memory<E4m3> const& codes, Memory<float> const& scales,
                   Memory<Bits> const& a, Memory<float> const& partials) const {
    double const s = scores_[permutation_[r]];
    double ds = 0, ds_slack = 0;
    std::vector<float> stored[2];
    for (std::int64_t c = c0; c < c0 + kBlock; ++c) {
      std::string const where = "row " + std::to_string(r) + ", column " + std::to_string(c);
      double const t = emulator::widen(emulator::round(sum(index_[r], expert, c)));
      double const g = h_of(r, 0, c), u = h_of(r, 1, c), sigmoid = 1 / (1 + std::exp(-g));
      double const act = g * sigmoid * u, slope = sigmoid * (1 + g * (1 - sigmoid));
      ds += t * act;
      ds_slack += std::fabs(t * g * u);
      if (outputs.a_scaled) {
        ASSERT_NO_FATAL_FAILURE(expect_near(emulator::widen(a[r * n_ + c]), s * act,
                                            std::fabs(s * g * u), "a', " + where));
      }
      for (int half = 0; half < 2 && outputs.dh; ++half) {
        float const value = emulator::widen(dh[(r * 2 + half) * n_ + c]);
        stored[half].push_back(value);
        double const want = half == 0 ? s * t * slope * u : s * t * g * sigmoid;
        double const slack =
            std::fabs(s * t) * (half == 0 ? std::fabs(u) * (1 + std::fabs(g)) : std::fabs(g));
        ASSERT_NO_FATAL_FAILURE(expect_near(value, want, slack, "dh, " + where));
      }
    }
    if (outputs.partials) {
      double const have = partials[(r * n_ + c0) / kBlock];
      ASSERT_TRUE(std::isnan(ds) ? std::isnan(have)
                                 : std::fabs(have - ds) <= ds_slack * 0x1p-11 + 1e-30)
          << "ds, row " << r << ", from " << c0 << ": " << have << ", not " << ds;
    }
    for (int half = 0; half < 2 && outputs.dh && outputs.dh8; ++half) {
      std::int64_t const at = (r * 2 + half) * n_ + c0;
      float const scale = scales[at % (2 * n_) / kBlock * pitch() + r];
      ASSERT_NO_FATAL_FAILURE(check_codes(stored[half], &codes[at], scale, r, c0));
    }
  }
  static void check_codes(std::vector<float> const& values, E4m3 const* codes, float scale,
                          std::int64_t r, std::int64_t c0) {
    std::uint32_t largest = 0;
    for (float const v : values) largest = std::max(largest, core::fp32_bits(v) & 0x7fffffffu);
    BlockScale const want = core::fp32_scale(largest);
    ASSERT_TRUE(core::fp32_bits(scale) == core::fp32_bits(want.scale) ||
                (scale != scale && want.scale != want.scale))
        << "scale of dh, row " << r << ", from " << c0 << ": " << scale << ", not " << want.scale;
    for (std::size_t c = 0; c < values.size(); ++c) {
      ASSERT_EQ(codes[c].bits, core::quantise(values[c], want).bits)
          << "code of dh, row " << r << ", from " << c0 << ", " << c;
    }
  }

  double h_of(std::int64_t r, int half, std::int64_t c) const {
    return core::to_fp32(h_[(r * 2 + half) * n_ + c]) *
           h_scales_[(half * n_ + c) / kBlock * pitch() + r];
  }
  float sum(std::int64_t token, std::int64_t expert, std::int64_t column) const {
    float all = 0;
    for (std::int64_t block = 0; block < d_ / kBlock; ++block) {
      float partial = 0;
      for (std::int64_t step = block * kBlock; step < (block + 1) * kBlock;
           step += emulator::kE4m3Products) {
        float products[emulator::kE4m3Products];
        for (int j = 0; j < emulator::kE4m3Products; ++j) {
          products[j] = core::to_fp32(d_o_[token * d_ + step + j]) *
                        core::to_fp32(w_[(expert * n_ + column) * d_ + step + j]);
        }
        partial = emulator::add_e4m3_products(partial, products);
      }
      std::int64_t const of_w = (expert * (n_ / kBlock) + column / kBlock) * (d_ / kBlock) + block;
      all = std::fma(partial, d_o_scales_[token * (d_ / kBlock) + block] * w_scales_[of_w], all);
    }
    return all;
  }

  static constexpr std::int64_t kMaxRows = 400;
  std::int64_t d_, n_, experts_, rows_ = 0;
  Memory<std::int32_t> offsets_, index_{kMaxRows}, permutation_{kMaxRows};
  Memory<float> scores_{kMaxRows};
  Memory<E4m3> d_o_{kTokens * d_};
  Memory<float> d_o_scales_{kTokens * d_ / kBlock};
  Memory<E4m3> w_{experts_ * n_ * d_};
  Memory<float> w_scales_{experts_ * n_ * d_ / (kBlock * kBlock)};
  Memory<E4m3> h_{kMaxRows * 2 * n_};
  Memory<float> h_scales_{kMaxRows * 2 * n_ / kBlock};
  Memory<std::int32_t> counter_{1, 0};
};

// Tiles without rows, of 1, 64 and 65 rows; several n_tiles.
TEST(DownProjectionDgradE4m3, ShortRows) {
  Problem const p({65, 0, 129, 1, 64}, 256, 512);
  for (emulator::Schedule const& schedule :
       {emulator::Schedule{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}}) {
    ASSERT_NO_FATAL_FAILURE(p.check({}, schedule)) << schedule.seed;
  }
}

TEST(DownProjectionDgradE4m3, LongRowsOfK) {
  Problem const p({3, 150}, 1152, 256);
  ASSERT_NO_FATAL_FAILURE(p.check({}, {.seed = 4}));
}

TEST(DownProjectionDgradE4m3, CodesOverThoseOfH) {
  Problem const p({70, 1, 60}, 128, 512);
  for (emulator::Schedule const& schedule :
       {emulator::Schedule{.seed = 5}, {.seed = 6, .burst = 64}, {.seed = 7, .copies = 256}}) {
    ASSERT_NO_FATAL_FAILURE(p.check({.over_h = true}, schedule)) << schedule.seed;
  }
}

TEST(DownProjectionDgradE4m3, StoresWhatIsAskedFor) {
  Problem const p({40, 90}, 128, 256);
  ASSERT_NO_FATAL_FAILURE(p.check({.dh = false}, {.seed = 8}));
  ASSERT_NO_FATAL_FAILURE(p.check({.dh8 = false}, {.seed = 9}));
  ASSERT_NO_FATAL_FAILURE(p.check({.a_scaled = false}, {.seed = 10}));
  ASSERT_NO_FATAL_FAILURE(p.check({.partials = false}, {.seed = 11}));
}

// The last tile has one block of 128 columns, or is the only one.
TEST(DownProjectionDgradE4m3, HalvesOfATile) {
  ASSERT_NO_FATAL_FAILURE(Problem({65, 0, 3}, 256, 384).check({}, {.seed = 12}));
  ASSERT_NO_FATAL_FAILURE(Problem({66, 1}, 128, 128).check({.over_h = true}, {.seed = 13}));
}

TEST(DownProjectionDgradE4m3, RefusesPartsOfABlock) {
  DownProjectionDgradE4m3Arguments args = {};
  using Config = DownProjectionDgradE4m3Config<ActivationKind::swiglu>;
  args.hidden = 192;
  args.intermediate = 256;
  EXPECT_EQ(launch_down_projection_dgrad_e4m3_config<Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
  args.hidden = 256;
  args.intermediate = 320;
  EXPECT_EQ(launch_down_projection_dgrad_e4m3_config<Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
