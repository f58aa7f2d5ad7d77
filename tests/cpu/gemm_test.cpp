// SPDX-License-Identifier: Apache-2.0
// gemm() with every kernel set of this machine against sums in fp64: layouts, gathers, biases, tails, storage types.
#include "cpu/parallel/gemm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tessera::cpu {
namespace {

using core::Bf16;
using core::round_to;
using core::to_fp32;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<GemmKernels const*> kernel_sets() {
  std::vector<GemmKernels const*> sets;
  for (GemmKernels const* const set : {portable_gemm_kernels(), avx2_gemm_kernels(),
                                       avx512_gemm_kernels(), avx512_bf16_gemm_kernels()}) {
    if (set != nullptr) sets.push_back(set);
  }
  return sets;
}

struct Size {
  std::int64_t m, n, k;
};
// Around the register tiles (4 x 8 to 14 x 32), odd k (half a pair of bf16), one of each, none.
constexpr Size kSizes[] = {{1, 1, 1},   {1, 70, 3},  {70, 1, 3},   {14, 32, 16}, {15, 33, 17},
                           {13, 31, 2}, {5, 9, 31},  {29, 65, 33}, {6, 16, 40},  {28, 64, 1},
                           {7, 100, 0}, {600, 3, 5}, {3, 600, 5},  {43, 77, 300}};

enum class Layout { rows, columns };

/// A stored matrix of T with padding that holds NaN, and its logical view.
template <class T>
struct Stored {
  std::vector<T> values;
  MatrixView<T> view;

  Stored(std::int64_t rows, std::int64_t columns, Layout layout, unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> distribution(-1, 1);
    bool const by_rows = layout == Layout::rows;
    std::int64_t const lines = by_rows ? rows : columns, length = by_rows ? columns : rows;
    std::int64_t const pitch = length + 3;
    values.assign(static_cast<std::size_t>(lines * pitch + 1), round_to<T>(kNan));
    view =
        by_rows ? MatrixView<T>{values.data(), pitch, 1} : MatrixView<T>{values.data(), 1, pitch};
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        *view.from(r, c).data = round_to<T>(distribution(random));
      }
    }
  }
  [[nodiscard]] double at(std::int64_t row, std::int64_t column) const {
    return to_fp32(*view.from(row, column).data);
  }
};

struct Variant {
  Layout a = Layout::rows, b = Layout::rows, c = Layout::rows;
  bool gather = false, bias = false, add = false;
};

/// Rows (of a), or summands (of both), named by an index that repeats and skips.
std::vector<std::int32_t> gather_index(std::int64_t count) {
  std::vector<std::int32_t> index(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) index[i] = static_cast<std::int32_t>(i * 7 % count);
  return index;
}

template <class In, class Out>
void check(GemmKernels const& kernels, Size s, Variant const& v) {
  SCOPED_TRACE(testing::Message() << kernels.name << " " << s.m << "x" << s.n << "x" << s.k
                                  << " layouts " << int(v.a) << int(v.b) << int(v.c) << " gather "
                                  << v.gather << " bias " << v.bias << " add " << v.add);
  Stored<In> const a(s.m, s.k, v.a, 1), b(s.k, s.n, v.b, 2);
  Stored<Out> c(s.m, s.n, v.c, 3);
  Stored<Out> const bias(1, s.n, Layout::rows, 4), before = [&] {
    Stored<Out> copy = c;
    copy.view.data = copy.values.data();
    return copy;
  }();
  // The index runs along the strided dimension: rows of a, or summands of it.
  bool const by_row = v.a == Layout::rows;
  auto const index = gather_index(by_row ? s.m : s.k);
  GemmResult to = result(c.view, v.bias ? bias.values.data() : nullptr);
  to.add = v.add;
  if (!v.add) {
    for (std::int64_t r = 0; r < s.m; ++r) {
      for (std::int64_t i = 0; i < s.n; ++i) *c.view.from(r, i).data = round_to<Out>(kNan);
    }
  }
  std::vector<float> scratch(gemm_scratch_floats(s.m, s.n, s.k), kNan);
  scratch.push_back(12345.0f);
  gemm_with(kernels, s.m, s.n, s.k, left_operand(a.view, v.gather ? index.data() : nullptr),
            right_operand(b.view), to, scratch.data());
  ASSERT_EQ(scratch.back(), 12345.0f) << "beyond the scratch";
  double const unit = std::is_same_v<Out, Bf16> ? std::ldexp(1.0, -8) : 0;
  for (std::int64_t r = 0; r < s.m; ++r) {
    for (std::int64_t i = 0; i < s.n; ++i) {
      double sum = v.add ? before.at(r, i) : 0, size = std::abs(sum);
      if (v.bias) sum += bias.at(0, i), size += std::abs(bias.at(0, i));
      for (std::int64_t k = 0; k < s.k; ++k) {
        std::int64_t const row = v.gather && by_row ? index[r] : r;
        std::int64_t const at = v.gather && !by_row ? index[k] : k;
        double const product = a.at(row, at) * b.at(k, i);
        sum += product;
        size += std::abs(product);
      }
      double const bound = std::ldexp(static_cast<double>(s.k + 4) * size, -24) + unit * size;
      ASSERT_NEAR(c.at(r, i), sum, bound) << "row " << r << " column " << i;
    }
  }
  // Nothing but the result was written: the padding still holds NaN.
  std::int64_t numbers = 0;
  for (Out const value : c.values) numbers += std::isnan(to_fp32(value)) ? 0 : 1;
  ASSERT_EQ(numbers, s.m * s.n);
}

template <class In, class Out>
void check_all() {
  constexpr Layout kLayouts[] = {Layout::rows, Layout::columns};
  for (GemmKernels const* const kernels : kernel_sets()) {
    if (kernels->multiplies_bf16 && !std::is_same_v<In, Bf16>) continue;
    for (Size const s : kSizes) {
      for (Layout const a : kLayouts) {
        for (Layout const b : kLayouts) {
          check<In, Out>(*kernels, s, {.a = a, .b = b, .gather = true});
          check<In, Out>(*kernels, s, {.a = a, .b = b, .bias = true});
          check<In, Out>(*kernels, s, {.a = a, .b = b, .c = Layout::columns});
          if (std::is_same_v<Out, float>) {
            check<In, Out>(*kernels, s, {.a = a, .b = b, .c = Layout::columns, .add = true});
            check<In, Out>(*kernels, s, {.a = a, .b = b, .add = true});
          }
        }
      }
    }
  }
}

TEST(Gemm, fp32) { check_all<float, float>(); }
TEST(Gemm, bf16_to_fp32) { check_all<Bf16, float>(); }
TEST(Gemm, bf16_to_bf16) { check_all<Bf16, Bf16>(); }

// Intel's cores have the instruction, and are faster without it.
TEST(Gemm, pairs_are_multiplied_where_that_pays) {
#if defined(__x86_64__)
  bool const pays = avx512_bf16_gemm_kernels() != nullptr && !__builtin_cpu_is("intel");
#else
  constexpr bool pays = false;
#endif
  EXPECT_EQ(gemm_kernels(true).multiplies_bf16, pays);
  EXPECT_FALSE(gemm_kernels(false).multiplies_bf16);
}

// fp32 sums run over k in order with one FMA each, whatever the tile: AVX2 and AVX-512 agree bit for bit.
TEST(Gemm, instruction_sets_with_fma_agree) {
  if (avx2_gemm_kernels() == nullptr || avx512_gemm_kernels() == nullptr) {
    GTEST_SKIP() << "this processor lacks AVX2 or AVX-512; run on a Xeon since Skylake or an EPYC "
                    "since Zen 4";
  }
  constexpr Size s{37, 75, 203};
  Stored<float> const a(s.m, s.k, Layout::rows, 1), b(s.k, s.n, Layout::columns, 2);
  std::vector<float> scratch(gemm_scratch_floats(s.m, s.n, s.k));
  std::vector<float> results[2];
  GemmKernels const* const sets[] = {avx2_gemm_kernels(), avx512_gemm_kernels()};
  for (int i = 0; i < 2; ++i) {
    results[i].resize(s.m * s.n);
    gemm_with(*sets[i], s.m, s.n, s.k, left_operand(a.view), right_operand(b.view),
              result(Matrix{results[i].data(), s.n, 1}), scratch.data());
  }
  EXPECT_EQ(results[0], results[1]);
}

// A row's bits depend on neither the rows beside it nor its place in a tile.
TEST(Gemm, rows_do_not_depend_on_their_neighbours) {
  constexpr Size s{40, 48, 65};
  Stored<Bf16> const a(s.m, s.k, Layout::rows, 1), b(s.k, s.n, Layout::rows, 2);
  std::vector<float> scratch(gemm_scratch_floats(s.m, s.n, s.k)), all(s.m * s.n), one(s.n);
  gemm(s.m, s.n, s.k, left_operand(a.view), right_operand(b.view),
       result(Matrix{all.data(), s.n, 1}), scratch.data());
  for (std::int64_t r = 0; r < s.m; ++r) {
    gemm(1, s.n, s.k, left_operand(a.view.from(r, 0)), right_operand(b.view),
         result(Matrix{one.data(), s.n, 1}), scratch.data());
    ASSERT_TRUE(std::equal(one.begin(), one.end(), all.begin() + r * s.n)) << "row " << r;
  }
}

// Products with the same b, whose panels fit into what is kept or do not: one block of rows after the other, as alone.
template <class T>
void check_kept_panels(Size s) {
  Stored<T> const a(s.m, s.k, Layout::rows, 1), b(s.k, s.n, Layout::rows, 2);
  std::vector<float> scratch(gemm_scratch_floats(s.m, s.n, s.k));
  std::vector<float> all(s.m * s.n), blocks(s.m * s.n, kNan), one(s.n);
  auto const multiply = [&](std::int64_t first, std::int64_t rows, float* c, Panels panels) {
    gemm(rows, s.n, s.k, left_operand(a.view.from(first, 0)), right_operand(b.view),
         result(Matrix{c, s.n, 1}), scratch.data(), panels);
  };
  multiply(0, s.m, all.data(), Panels::used_once);
  std::int64_t const third = s.m / 3;
  multiply(0, third, blocks.data(), Panels::kept);
  multiply(third, 1, blocks.data() + third * s.n, Panels::reused);
  multiply(third + 1, s.m - third - 1, blocks.data() + (third + 1) * s.n, Panels::reused);
  EXPECT_EQ(all, blocks);
  multiply(s.m - 1, 1, one.data(), Panels::used_once);
  EXPECT_TRUE(std::equal(one.begin(), one.end(), all.end() - s.n));
}
TEST(Gemm, panels_serve_several_products) {
  for (Size const s : {Size{40, 48, 65}, Size{250, 100, 1500}, Size{250, 300, 2000}}) {
    check_kept_panels<float>(s);
    check_kept_panels<Bf16>(s);
  }
}

template <class In>
void check_rounding(GemmKernels const& kernels) {
  constexpr Size s{30, 64, 3};
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float const full_nan = __builtin_bit_cast(float, 0x7fffffffu);  // rounding up would make it -0
  float const special[] = {full_nan, kInfinity, -kInfinity, -0.0f, 3e38f, -3e38f, 1e-38f, 1e-40f};
  Stored<In> a(s.m, s.k, Layout::rows, 1), b(s.k, s.n, Layout::rows, 2);
  for (std::int64_t i = 0; i < 8; ++i) *a.view.from(i, i % 3).data = round_to<In>(special[i]);
  for (std::int64_t i = 8; i < s.m; ++i) *a.view.from(i, 2).data = round_to<In>(1.0f);
  for (std::int64_t i = 0; i < s.n; ++i) {  // few bits: sums meet ties
    *b.view.from(i % 2, i).data = round_to<In>(1.0f + static_cast<float>(i) * 0x1p-7f);
  }
  std::vector<float> scratch(gemm_scratch_floats(s.m, s.n, s.k)), sums(s.m * s.n);
  std::vector<Bf16> rounded(s.m * s.n);
  SCOPED_TRACE(kernels.name);
  ASSERT_EQ(s.n % kernels.columns, 0);
  gemm_with(kernels, s.m, s.n, s.k, left_operand(a.view), right_operand(b.view),
            result(Matrix{sums.data(), s.n, 1}), scratch.data());
  gemm_with(kernels, s.m, s.n, s.k, left_operand(a.view), right_operand(b.view),
            result(MatrixView<Bf16>{rounded.data(), s.n, 1}), scratch.data());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(rounded[i].bits, round_to<Bf16>(sums[i]).bits) << sums[i];
  }
}

// Whole tiles are rounded in registers: the bits of round_to, for NaN, infinities, overflow and denormals, too.
TEST(Gemm, rounds_whole_tiles_as_everyone_does) {
  for (GemmKernels const* const kernels : kernel_sets()) {
    check_rounding<Bf16>(*kernels);
    if (!kernels->multiplies_bf16) check_rounding<float>(*kernels);
  }
}

TEST(Bf16, rounds_to_nearest_even_and_keeps_what_is_special) {
  auto const rounded = [](float value) { return to_fp32(round_to<Bf16>(value)); };
  EXPECT_EQ(rounded(1.0f + 0x1p-8f), 1.0f);               // a tie goes to even: down
  EXPECT_EQ(rounded(1.0f + 0x3p-8f), 1.0f + 0x1p-6f);     // and up
  EXPECT_EQ(rounded(1.0f + 0x1.01p-8f), 1.0f + 0x1p-7f);  // above a tie
  EXPECT_EQ(rounded(-0.0f), 0.0f);
  EXPECT_TRUE(std::signbit(rounded(-0.0f)));
  EXPECT_EQ(rounded(0x1p-130f), 0x1p-130f);  // denormals stay
  EXPECT_EQ(rounded(std::numeric_limits<float>::max()), std::numeric_limits<float>::infinity());
  EXPECT_EQ(rounded(-std::numeric_limits<float>::infinity()),
            -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(rounded(kNan)));
  EXPECT_TRUE(std::isnan(
      rounded(__builtin_bit_cast(float, 0x7f800001u))));  // payload in the lower half only
}

}  // namespace
}  // namespace tessera::cpu
