// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of e4m3 operands, from the source that GPUs get: bit for bit 128 products in the order of k, then
// blocks of them by one FMA each with the product of their scales; its codes and scales are those of core/fp8.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/fp8.hpp"
#include "cuda/kernels/up_projection_fwd_e4m3.cuh"
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
using gemm::Element;

constexpr int kBlock = 128, kTokens = 50, kRowsPast = 5;

std::uint32_t magnitude_of(float value) { return core::fp32_bits(value) & 0x7fffffffu; }

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
};

// Codes and scales of x and w_up, and what the kernel should make of them.
class Problem {
 public:
  explicit Problem(Shape const& s)
      : d_(s.hidden),
        n_(s.intermediate),
        experts_(static_cast<int>(s.rows.size())),
        offsets_(experts_ + 1) {
    for (int e = 0; e < experts_; ++e) {
      offsets_[e] = rows_;
      rows_ += s.rows[static_cast<std::size_t>(e)];
    }
    offsets_[experts_] = rows_;
    for (int r = 0; r < rows_; ++r) index_[r] = (7 * r + 3) % kTokens;
    quantise_x();
    quantise_w();
  }

  UpProjectionFwdE4m3Arguments arguments() const {
    UpProjectionFwdE4m3Arguments args = {};
    args.gmem_x = x_.get();
    args.gmem_x_scales = x_scales_.get();
    args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = offsets_.get();
    args.gmem_w_up = w_.get();
    args.gmem_w_up_scales = w_scales_.get();
    args.activation = {.kind = ActivationKind::swiglu};
    args.rows = capacity();
    args.hidden = d_;
    args.intermediate = n_;
    args.experts = experts_;
    args.gmem_tile_counter = counter_.get();
    return args;
  }

  int d() const { return d_; }
  int n() const { return n_; }
  int rows() const { return rows_; }
  int capacity() const { return rows_ + kRowsPast; }
  std::int64_t scale_pitch() const { return padded_scale_rows(capacity()); }

  // hb of a row, gate before up.
  std::vector<Bits> h_of(int row, int expert) const {
    std::vector<Bits> h;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < n_; ++i) h.push_back(emulator::round(sum(index_[row], expert, half, i)));
    }
    return h;
  }
  int expert_of(int row) const {
    int expert = 0;
    while (row >= offsets_[expert + 1]) ++expert;
    return expert;
  }

 private:
  static float noise(std::int64_t i, int seed) {
    return static_cast<float>((i * 7919 + seed * 104729) % 2003 - 1001) / 1001.0f;
  }
  // Rows and blocks of k have scales of their own.
  static float spread(std::int64_t row, std::int64_t block) {
    return std::ldexp(1.0f, static_cast<int>((5 * row + 3 * block) % 7) - 3);
  }

  void quantise_x() {
    for (int t = 0; t < kTokens; ++t) {
      for (int block = 0; block < d_ / kBlock; ++block) {
        float values[kBlock];
        std::uint32_t largest = 0;
        for (int c = 0; c < kBlock; ++c) {
          values[c] = noise(std::int64_t{t} * d_ + block * kBlock + c, 1) * spread(t, block);
          if (t == 4) values[c] = c % 2 == 0 ? 0.0f : -0.0f;
          if (t == 9 && block == 1 && c == 77) values[c] = std::numeric_limits<float>::quiet_NaN();
          largest = std::max(largest, magnitude_of(values[c]));
        }
        BlockScale const scale = core::fp32_scale(largest);
        x_scales_[t * (d_ / kBlock) + block] = scale.scale;
        for (int c = 0; c < kBlock; ++c)
          x_[t * d_ + block * kBlock + c] = core::quantise(values[c], scale);
      }
    }
  }

  void quantise_w() {
    for (int e = 0; e < experts_; ++e) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < n_; i += kBlock) {
          for (int k = 0; k < d_; k += kBlock) quantise_block(e, half, i, k);
        }
      }
    }
  }
  void quantise_block(int e, int half, int i0, int k0) {
    float const scale_of_block = spread(e * 2 + half + i0 / kBlock, k0 / kBlock) * 0.05f;
    auto const value = [&](int i, int k) {
      return noise(((std::int64_t{e} * 2 + half) * n_ + i0 + i) * d_ + k0 + k, 2) * scale_of_block;
    };
    std::uint32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
      for (int k = 0; k < kBlock; ++k) largest = std::max(largest, magnitude_of(value(i, k)));
    }
    BlockScale const scale = core::fp32_scale(largest);
    w_scales_[w_scale_at(e, half, i0, k0)] = scale.scale;
    for (int i = 0; i < kBlock; ++i) {
      for (int k = 0; k < kBlock; ++k)
        w_[w_at(e, half, i0 + i) + k0 + k] = core::quantise(value(i, k), scale);
    }
  }
  std::int64_t w_at(int e, int half, int i) const {
    return ((std::int64_t{e} * 2 + half) * n_ + i) * d_;
  }
  std::int64_t w_scale_at(int e, int half, int i, int k) const {
    return ((std::int64_t{e} * (n_ / kBlock) + i / kBlock) * (d_ / kBlock) + k / kBlock) * 2 + half;
  }

  float sum(int token, int expert, int half, int i) const {
    float all = 0;
    for (int k0 = 0; k0 < d_; k0 += kBlock) {
      float partial = 0;
      for (int step = k0; step < k0 + kBlock; step += emulator::kE4m3Products) {
        float products[emulator::kE4m3Products];
        for (int j = 0; j < emulator::kE4m3Products; ++j) {
          products[j] = core::to_fp32(x_[token * d_ + step + j]) *
                        core::to_fp32(w_[w_at(expert, half, i) + step + j]);
        }
        partial = emulator::add_e4m3_products(partial, products);
      }
      float const scale = x_scales_[token * (d_ / kBlock) + k0 / kBlock] *
                          w_scales_[w_scale_at(expert, half, i, k0)];
      all = std::fma(partial, scale, all);
    }
    return all;
  }

  int d_, n_, experts_, rows_ = 0;
  Memory<std::int32_t> offsets_;
  Memory<std::int32_t> index_{1000};
  Memory<E4m3> x_{std::int64_t{kTokens} * d_};
  Memory<float> x_scales_{std::int64_t{kTokens} * d_ / kBlock};
  Memory<E4m3> w_{std::int64_t{experts_} * 2 * n_ * d_};
  Memory<float> w_scales_{std::int64_t{experts_} * 2 * n_ * d_ / (kBlock * kBlock)};
  Memory<std::int32_t> counter_{1, 0};
};

float activate(Bits gate, Bits up) {
  return gemm::ActivationFunction<ActivationKind::swiglu>::forward({}, emulator::widen(gate),
                                                                   emulator::widen(up));
}

// Bytes are as they were before, poison.
template <class T>
bool untouched(Memory<T> const& memory, std::int64_t from, std::int64_t count) {
  auto const* const bytes = reinterpret_cast<unsigned char const*>(memory.get() + from);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count) * sizeof(T); ++i) {
    if (bytes[i] != 0xff) return false;
  }
  return true;
}

template <Element kOut>
using Config = UpProjectionFwdE4m3Config<ActivationKind::swiglu, kOut>;

template <Element kOut>
void run(UpProjectionFwdE4m3Arguments const& args, emulator::Schedule const& schedule) {
  ASSERT_EQ((launch_up_projection_fwd_e4m3_config<Config<kOut>>(args, 2, nullptr)), cudaSuccess);
  ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
}

// A block of 128 values of a row as codes and a scale.
void expect_block(std::vector<float> const& values, E4m3 const* codes, float scale,
                  std::string const& where) {
  std::uint32_t largest = 0;
  for (float const v : values) largest = std::max(largest, magnitude_of(v));
  BlockScale const wanted = core::fp32_scale(largest);
  ASSERT_TRUE(core::fp32_bits(scale) == core::fp32_bits(wanted.scale) ||
              (scale != scale && wanted.scale != wanted.scale))
      << where << ": scale " << scale << " for " << wanted.scale;
  for (std::size_t c = 0; c < values.size(); ++c) {
    ASSERT_EQ(codes[c].bits, core::quantise(values[c], wanted).bits) << where << ", column " << c;
  }
}

void check_codes(Problem const& p, emulator::Schedule const& schedule) {
  std::int64_t const n = p.n(), capacity = p.capacity(), pitch = p.scale_pitch();
  Memory<E4m3> h(capacity * 2 * n), a(capacity * n);
  Memory<float> h_scales(2 * n / kBlock * pitch), a_scales(n / kBlock * pitch);
  UpProjectionFwdE4m3Arguments args = p.arguments();
  args.gmem_h = h.get();
  args.gmem_a = a.get();
  args.gmem_h_scales = h_scales.get();
  args.gmem_a_scales = a_scales.get();
  ASSERT_NO_FATAL_FAILURE((run<Element::kE4m3>(args, schedule)));
  for (int r = 0; r < p.rows(); ++r) {
    std::vector<Bits> const hb = p.h_of(r, p.expert_of(r));
    for (std::int64_t c0 = 0; c0 < 2 * n; c0 += kBlock) {
      std::vector<float> h_values, a_values;
      for (std::int64_t c = c0; c < c0 + kBlock; ++c) {
        h_values.push_back(emulator::widen(hb[static_cast<std::size_t>(c)]));
        if (c < n) {
          a_values.push_back(
              activate(hb[static_cast<std::size_t>(c)], hb[static_cast<std::size_t>(c + n)]));
        }
      }
      std::string const where =
          "row " + std::to_string(r) + ", block " + std::to_string(c0 / kBlock);
      expect_block(h_values, &h[r * 2 * n + c0], h_scales[c0 / kBlock * pitch + r], "h, " + where);
      if (c0 < n)
        expect_block(a_values, &a[r * n + c0], a_scales[c0 / kBlock * pitch + r], "a, " + where);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_TRUE(untouched(h, p.rows() * 2 * n, kRowsPast * 2 * n));
  EXPECT_TRUE(untouched(a, p.rows() * n, kRowsPast * n));
  for (std::int64_t block = 0; block < 2 * n / kBlock; ++block) {
    EXPECT_TRUE(untouched(h_scales, block * pitch + p.rows(), pitch - p.rows()));
    if (block < n / kBlock) {
      EXPECT_TRUE(untouched(a_scales, block * pitch + p.rows(), pitch - p.rows()));
    }
  }
}

void check_bf16(Problem const& p, emulator::Schedule const& schedule) {
  std::int64_t const n = p.n();
  Memory<Bits> h(p.capacity() * 2 * n), a(p.capacity() * n);
  UpProjectionFwdE4m3Arguments args = p.arguments();
  args.gmem_h = h.get();
  args.gmem_a = a.get();
  ASSERT_NO_FATAL_FAILURE(run<Element::kBf16>(args, schedule));
  for (int r = 0; r < p.rows(); ++r) {
    std::vector<Bits> const hb = p.h_of(r, p.expert_of(r));
    ASSERT_EQ(std::vector<Bits>(&h[r * 2 * n], &h[(r + 1) * 2 * n]), hb) << "row " << r;
    for (std::int64_t c = 0; c < n; ++c) {
      ASSERT_EQ(a[r * n + c], emulator::round(activate(hb[static_cast<std::size_t>(c)],
                                                       hb[static_cast<std::size_t>(c + n)])))
          << "row " << r << ", column " << c;
    }
  }
  EXPECT_TRUE(untouched(h, p.rows() * 2 * n, kRowsPast * 2 * n));
  EXPECT_TRUE(untouched(a, p.rows() * n, kRowsPast * n));
}

// Fewer k_tiles than pieces, and more; tiles of 1, 64 and 65 rows, without rows, of several n_tiles.
TEST(UpProjectionFwdE4m3, CodesAreThoseOfTheCpu) {
  Problem const p({.rows = {127, 0, 129, 1, 64}, .hidden = 256, .intermediate = 256});
  for (emulator::Schedule const& schedule :
       {emulator::Schedule{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}}) {
    ASSERT_NO_FATAL_FAILURE(check_codes(p, schedule)) << schedule.seed;
  }
}

TEST(UpProjectionFwdE4m3, LongRowsOfK) {
  Problem const p({.rows = {3, 200}, .hidden = 1152, .intermediate = 128});
  ASSERT_NO_FATAL_FAILURE(check_codes(p, {.seed = 4}));
}

TEST(UpProjectionFwdE4m3, Bf16OutOfTheSameSums) {
  Problem const p({.rows = {130, 0, 31}, .hidden = 640, .intermediate = 256});
  ASSERT_NO_FATAL_FAILURE(check_bf16(p, {.seed = 5}));
}

TEST(UpProjectionFwdE4m3, NothingWithoutOutputs) {
  Problem const p({.rows = {40}, .hidden = 128, .intermediate = 128});
  ASSERT_NO_FATAL_FAILURE(run<Element::kE4m3>(p.arguments(), {.seed = 6}));
}

TEST(UpProjectionFwdE4m3, RefusesPartsOfABlock) {
  Problem const p({.rows = {8}, .hidden = 256, .intermediate = 128});
  UpProjectionFwdE4m3Arguments args = p.arguments();
  args.hidden = 192;
  EXPECT_EQ(launch_up_projection_fwd_e4m3_config<Config<Element::kE4m3>>(args, 2, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
