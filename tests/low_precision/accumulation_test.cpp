// SPDX-License-Identifier: Apache-2.0
// Why partial sums are promoted to fp32 every 128 products: errors of the tensor core's accumulator, emulated.
#include <gtest/gtest.h>

#include "tests/low_precision/support.hpp"
#include "tests/low_precision/tensor_core.hpp"

namespace tessera::low_precision_tests {
namespace {

/// Of D = a b^T with a, b quantised, against fp64 on the dequantised operands.
struct Errors {
  double norm;  ///< |D - exact| / |exact|
  double bias;  ///< sum of (D - exact) / sum of exact
};

Errors errors_of(std::int64_t k, bool positive, Sums sums) {
  std::int64_t const m = 16, n = 64;
  Values a = normal(m * k, 1), b = normal(128 * k, 2, 1 / std::sqrt(static_cast<double>(k)));
  for (Values* values : {&a, &b}) {
    for (double& value : *values) value = positive ? std::abs(value) : value;
  }
  auto const a8 = reference::quantise(a, m, k, {1, 128}, ScaleRule::fp32);
  auto const b8 = reference::quantise(b, 128, k, {128, 128}, ScaleRule::fp32);
  Values const x = reference::dequantised(a8), w = reference::dequantised(b8);
  double error = 0, norm = 0, bias = 0, total = 0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double exact = 0;
      for (std::int64_t c = 0; c < k; ++c) exact += x[i * k + c] * w[j * k + c];
      double const difference = dot(a8, i, b8, j, sums) - exact;
      error += difference * difference;
      norm += exact * exact;
      bias += difference;
      total += exact;
    }
  }
  return {std::sqrt(error / norm), bias / total};
}

TEST(Accumulation, PromotedSumsStayBelowTheRoundingOfBf16) {
  for (std::int64_t const k : {256, 768, 2048}) {
    EXPECT_NEAR(errors_of(k, false, Sums::promoted).norm, 1.3e-4, 0.15e-4) << k;
    EXPECT_NEAR(errors_of(k, true, Sums::promoted).bias, -0.0006, 0.0001) << k;
  }
}

TEST(Accumulation, OneAccumulatorLosesMoreTheLongerTheSum) {
  EXPECT_NEAR(errors_of(768, false, Sums::rescaled).norm, 4.7e-4, 0.5e-4);
  EXPECT_NEAR(errors_of(2048, false, Sums::rescaled).norm, 9.6e-4, 1e-4);
  EXPECT_NEAR(errors_of(256, true, Sums::rescaled).bias, -0.002, 0.0003);
  EXPECT_NEAR(errors_of(768, true, Sums::rescaled).bias, -0.010, 0.001);
  EXPECT_NEAR(errors_of(2048, true, Sums::rescaled).bias, -0.034, 0.002);
}

TEST(DeepAccumulation, LongestSums) {
  EXPECT_NEAR(errors_of(4096, false, Sums::promoted).norm, 1.3e-4, 0.15e-4);
  EXPECT_NEAR(errors_of(4096, true, Sums::promoted).bias, -0.0006, 0.0001);
  EXPECT_NEAR(errors_of(4096, false, Sums::rescaled).norm, 1.6e-3, 0.15e-3);
  EXPECT_NEAR(errors_of(4096, true, Sums::rescaled).bias, -0.069, 0.003);
}

TEST(Accumulation, IsExactWhereNothingIsCut) {
  double a[kProducts], b[kProducts];
  for (int i = 0; i < kProducts; ++i) {
    a[i] = i % 8;
    b[i] = 1;
  }
  EXPECT_EQ(accumulate(100, a, b), 100 + 4 * 28);
  std::fill_n(a, kProducts, 0.0);
  EXPECT_EQ(accumulate(0, a, b), 0);
  a[3] =
      -0x1p-9;  // 2^14 below the accumulator: it is lost, and so is the fraction of the accumulator itself
  EXPECT_EQ(accumulate(32 + 0x1p-9, a, b), 32);
  EXPECT_EQ(accumulate(-0x1p-9, a, b), -0x1p-8);
}

}  // namespace
}  // namespace tessera::low_precision_tests
