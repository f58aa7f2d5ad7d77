// SPDX-License-Identifier: Apache-2.0
#include "core/fp32_math.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace tessera::core {
namespace {

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// Every 1009th fp32 value, NaN left out.
std::vector<float> spread_values() {
  std::vector<float> values;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 1009) {
    float const x = from_bits(static_cast<std::uint32_t>(bits));
    if (x == x) values.push_back(x);
  }
  return values;
}

TEST(ExpFp32, StaysWithinOneUlp) {
  double worst = 0;
  for (float const x : spread_values()) {
    if (x < -87.0f || x > 88.7f) continue;
    double const exact = std::exp(static_cast<double>(x));
    double const ulp = std::ldexp(1.0, std::ilogb(static_cast<float>(exact)) - 23);
    worst = std::max(worst, std::abs(static_cast<double>(exp_fp32(x)) - exact) / ulp);
  }
  EXPECT_LT(worst, 1.0);
  EXPECT_GT(worst, 0.4);  // not comparing a function with itself
}

TEST(ExpFp32, IsRightAtTheEdges) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_fp32(0.0f), 1.0f);
  EXPECT_EQ(exp_fp32(-0.0f), 1.0f);
  EXPECT_EQ(exp_fp32(kInf), kInf);
  EXPECT_EQ(exp_fp32(-kInf), 0.0f);
  EXPECT_EQ(exp_fp32(1000.0f), kInf);
  EXPECT_EQ(exp_fp32(-1000.0f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_fp32(std::nanf(""))));
  EXPECT_LT(exp_fp32(88.72f), kInf);
  float const subnormal = exp_fp32(-95.0f);
  EXPECT_GT(subnormal, 0.0f);
  EXPECT_LT(subnormal, std::numeric_limits<float>::min());
}

TESSERA_SIMD void exp_many(float const* x, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = exp_fp32(x[i]);
}

__attribute__((noinline)) float exp_one(float x) { return exp_fp32(x); }

TEST(ExpFp32, HasTheSameBitsInVectorAndScalarCode) {
  std::vector<float> const x = spread_values();
  std::vector<float> out(x.size());
  exp_many(x.data(), x.size(), out.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    float const scalar = exp_one(x[i]);
    ASSERT_EQ(std::memcmp(&scalar, &out[i], sizeof(float)), 0) << x[i];
  }
}

TEST(ExpFp32, HasTheSameBitsByFewerOperations) {
  for (float const x : spread_values()) {
    if (!(std::abs(x) <= 80.0f)) continue;
    ASSERT_EQ(exp_fp32_of_normal(x), exp_fp32(x)) << x;
  }
}

/// `count` mantissas of divisors: the least, the largest, and any.
std::vector<std::uint32_t> mantissas(std::size_t count) {
  std::vector<std::uint32_t> values;
  for (std::uint32_t i = 0; i < 40; ++i) {
    values.push_back(0x800000u + i);
    values.push_back(0xffffffu - i);
  }
  std::mt19937 random(5);
  while (values.size() < count) values.push_back(0x800000u + random() % 0x800000u);
  return values;
}

float scaled(std::uint64_t mantissa, int exponent) {
  return std::ldexp(static_cast<float>(mantissa), exponent - 23);
}

TEST(DivisionBy, HasTheBitsOfTheDivision) {
  std::mt19937 random(9);
  for (std::uint32_t const b : mantissas(20000)) {
    float const divisor = scaled(b, static_cast<int>(random() % 20));
    DivisionBy const by(divisor);
    for (int i = 0; i < 30; ++i) {
      // Like and unlike the divisor's, as products with the reciprocal are furthest off a little below it.
      std::uint32_t const a =
          i < 10 ? b - static_cast<std::uint32_t>(i - 5) : 0x800000u + random() % 0x800000u;
      float const dividend = scaled(a, -89 + static_cast<int>(random() % 108));
      ASSERT_EQ(by.quotient(dividend), dividend / divisor) << dividend << " / " << divisor;
    }
    ASSERT_EQ(by.quotient(divisor), 1.0f);
    ASSERT_EQ(by.quotient(0x1p-90f), 0x1p-90f / divisor);
  }
}

/// Quotients of every `step`-th mantissa as near as they can be to the middle between two numbers; returns how many.
/// With the divisor's odd part b: a 2^power = m b + d for a small odd d, where m is the middle of two mantissas.
std::size_t check_near_the_middle(std::uint32_t step) {
  std::size_t quotients = 0;
  for (std::uint32_t whole = 0x800000u; whole < 0x1000000u; whole += step) {
    int const zeros = std::countr_zero(whole);
    if (zeros > 2) continue;  // d 2^zeros would not be small
    auto const divisor = static_cast<float>(whole);
    DivisionBy const by(divisor);
    std::uint64_t const b = whole >> zeros;
    std::uint64_t inverse = b;  // modulo any power of two up to 2^96, by Newton's method
    for (int i = 0; i < 5; ++i) inverse *= 2 - b * inverse;
    for (int power = 24 - zeros; power <= 25 - zeros; ++power) {
      std::uint64_t const modulus = std::uint64_t{1} << power;
      for (std::int64_t d = -7; d <= 7; d += 2) {
        auto const added = static_cast<std::uint64_t>(d);
        for (std::uint64_t m = (0 - added * inverse) % modulus; m < 1u << 25; m += modulus) {
          std::uint64_t const a = (m * b + added) >> power;
          if (m >> 24 != 1 || a >> 23 != 1) continue;
          auto const dividend = static_cast<float>(a);
          if (by.quotient(dividend) != dividend / divisor) {
            ADD_FAILURE() << dividend << " / " << divisor;
            return 0;
          }
          ++quotients;
        }
      }
    }
  }
  return quotients;
}

TEST(DivisionBy, RoundsQuotientsNearTheMiddle) { EXPECT_GT(check_near_the_middle(61), 1000000u); }

TEST(DivisionBy, RoundsThemForEveryDivisor) { EXPECT_GT(check_near_the_middle(1), 60000000u); }

TEST(SigmoidPairFp32, KeepsRelativeAccuracyOnBothSides) {
  for (float x = -80.0f; x < 80.0f; x += 0.37f) {
    double const e = std::exp(-static_cast<double>(x));
    auto const [value, complement] = sigmoid_pair_fp32(x);
    EXPECT_NEAR(value / (1.0 / (1.0 + e)), 1.0, 3e-7) << x;
    EXPECT_NEAR(complement / (e / (1.0 + e)), 1.0, 3e-7) << x;
  }
  EXPECT_EQ(sigmoid_pair_fp32(-1000.0f).complement, 1.0f);
  EXPECT_EQ(sigmoid_pair_fp32(1000.0f).complement, 0.0f);
}

TEST(Log1pFp32, StaysWithinTwoUlps) {
  for (float u = 1e-30f; u <= 1.0f; u *= 1.01f) {
    double const exact = std::log1p(static_cast<double>(u));
    EXPECT_NEAR(log1p_fp32(u) / exact, 1.0, 2.4e-7) << u;
  }
  EXPECT_EQ(log1p_fp32(0.0f), 0.0f);
}

TEST(Expm1Fp32, StaysWithinTwoUlps) {
  for (float x = 1e-30f; x < 80.0f; x *= 1.01f) {
    for (float const signed_x : {x, -x}) {
      double const exact = std::expm1(static_cast<double>(signed_x));
      EXPECT_NEAR(expm1_fp32(signed_x) / exact, 1.0, 2.4e-7) << signed_x;
    }
  }
  EXPECT_EQ(expm1_fp32(0.0f), 0.0f);
  EXPECT_EQ(expm1_fp32(-std::numeric_limits<float>::infinity()), -1.0f);
  EXPECT_TRUE(std::isnan(expm1_fp32(std::nanf(""))));
}

TEST(LogFp32, StaysWithinTwoUlps) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_NEAR(log_fp32(1.0f + 0x1p-23f) / std::log1p(0x1p-23), 1.0, 2.4e-7);
  for (float x = 1.01f; x < kInf; x *= 1.003f) {
    EXPECT_NEAR(log_fp32(x) / std::log(static_cast<double>(x)), 1.0, 2.4e-7) << x;
  }
  EXPECT_EQ(log_fp32(1.0f), 0.0f);
  EXPECT_EQ(log_fp32(kInf), kInf);
  EXPECT_TRUE(std::isnan(log_fp32(std::nanf(""))));
}

TEST(SoftplusFp32, IsLinearAboveAndExponentialBelow) {
  EXPECT_EQ(softplus_fp32(100.0f), 100.0f);
  EXPECT_NEAR(softplus_fp32(-30.0f) / std::exp(-30.0), 1.0, 3e-7);
  EXPECT_NEAR(softplus_fp32(0.0f), std::log(2.0), 1e-7);
  EXPECT_TRUE(std::isnan(softplus_fp32(std::nanf(""))));
}

// Sums 32 interleaved parts, then halves: what a warp does; visible with values that cancel.
TEST(WarpSum, FoldsInterleavedPartsByHalves) {
  std::vector<float> values(64, 0.0f);
  values[0] = 1e8f;
  values[32] = 1.0f;   // the same part as 0: lost
  values[16] = -1e8f;  // folded onto part 0 first
  values[1] = 3.0f;
  EXPECT_EQ(warp_sum(values.data(), 64), 3.0f);
  EXPECT_EQ(warp_sum(values.data(), 0), 0.0f);
}

TEST(SigmoidFp32, KeepsRelativeAccuracyForNegativeArguments) {
  for (float x = -80.0f; x < 20.0f; x += 0.37f) {
    double const exact = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
    EXPECT_NEAR(sigmoid_fp32(x) / exact, 1.0, 3e-7) << x;
  }
}

}  // namespace
}  // namespace tessera::core
