// SPDX-License-Identifier: Apache-2.0
// The bits of e4m3, e8m0 and scales against their definitions, for every bf16 value and every tie.
#include "core/fp8.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu/reference/quantise.hpp"

namespace tessera {
namespace {

using core::E4m3;
using core::E8m0;

float of_bf16(int bits) { return core::to_fp32(core::Bf16{static_cast<std::uint16_t>(bits)}); }

/// The magnitude of code 0 .. 0x7e, from its fields.
double magnitude_of(int code) {
  int const exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

/// The code whose value is nearest, by looking at all of them; of two the even one. Differences of fp32 and e4m3 values
/// are exact in fp64 unless they are so large that none is near.
int nearest_code(double value) {
  if (std::isnan(value)) return core::kE4m3Nan;
  double const magnitude = std::abs(value);
  int best = 0;
  for (int code = 1; code <= 0x7e; ++code) {
    double const distance = std::abs(magnitude - magnitude_of(code));
    double const least = std::abs(magnitude - magnitude_of(best));
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

TEST(E4m3, DecodesEveryCode) {
  for (int bits = 0; bits < 256; ++bits) {
    float const value = core::to_fp32(E4m3{static_cast<std::uint8_t>(bits)});
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    EXPECT_EQ(std::abs(value), magnitude_of(bits & 0x7f)) << bits;
    EXPECT_EQ(std::signbit(value), bits >= 0x80) << bits;
    EXPECT_EQ(core::round_to<E4m3>(value).bits, bits);
  }
  EXPECT_EQ(magnitude_of(0x7e), 448);
  EXPECT_EQ(magnitude_of(0x08), 0x1p-6);
}

TEST(E4m3, EncodesEveryBf16) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    float const value = of_bf16(bits);
    int const code = core::round_to<E4m3>(value).bits;
    ASSERT_EQ(code, nearest_code(value)) << value;
    double const rounded = reference::to_e4m3(value);
    ASSERT_EQ(std::isnan(rounded), std::isnan(value));
    if (std::isnan(value)) continue;
    ASSERT_EQ(rounded, core::to_fp32(E4m3{static_cast<std::uint8_t>(code)})) << value;
    ASSERT_EQ(std::signbit(rounded), std::signbit(value)) << value;
  }
}

TEST(E4m3, EncodesTiesAndTheirNeighbours) {
  for (int code = 0; code < 0x7e; ++code) {
    auto const tie = static_cast<float>((magnitude_of(code) + magnitude_of(code + 1)) / 2);
    for (float const value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 500.0f)}) {
      ASSERT_EQ(core::round_to<E4m3>(value).bits, nearest_code(value)) << value;
      ASSERT_EQ(core::round_to<E4m3>(-value).bits, nearest_code(-value)) << value;
      ASSERT_EQ(reference::to_e4m3(value), magnitude_of(nearest_code(value))) << value;
    }
  }
  EXPECT_EQ(core::round_to<E4m3>(0x1p-10f).bits, 0);
  EXPECT_EQ(core::round_to<E4m3>(-0x1p-10f).bits, 0x80);
  EXPECT_EQ(core::round_to<E4m3>(-0.0f).bits, 0x80);
  EXPECT_EQ(core::round_to<E4m3>(HUGE_VALF).bits, 0x7e);
  EXPECT_EQ(core::round_to<E4m3>(-1e30f).bits, 0xfe);
  EXPECT_EQ(core::round_to<E4m3>(-NAN).bits, core::kE4m3Nan);
}

TEST(E8m0, DecodesEveryByte) {
  for (int bits = 0; bits < 255; ++bits) {
    EXPECT_EQ(core::to_fp32(E8m0{static_cast<std::uint8_t>(bits)}), std::ldexp(1.0, bits - 127));
  }
  EXPECT_TRUE(std::isnan(core::to_fp32(E8m0{0xff})));
}

void expect_scale(core::BlockScale const& have, reference::Scale const& want, float largest) {
  if (std::isnan(want.scale)) {
    ASSERT_EQ(core::fp32_bits(have.scale), core::kFp32Nan) << largest;
    ASSERT_TRUE(std::isnan(have.inverse)) << largest;
    return;
  }
  ASSERT_EQ(have.scale, want.scale) << largest;
  ASSERT_EQ(have.inverse, want.inverse) << largest;
}

TEST(Scale, EveryBf16Amax) {
  for (int bits = 0; bits < 0x8000; ++bits) {
    float const largest = of_bf16(bits);
    std::uint32_t const word = core::fp32_bits(largest);
    expect_scale(core::fp32_scale(word), reference::scale_of(largest, ScaleRule::fp32), largest);
    expect_scale(core::pow2_scale(word), reference::scale_of(largest, ScaleRule::pow2), largest);
    for (bool const floor : {false, true}) {
      auto const rule = floor ? ScaleRule::floor : ScaleRule::rceil;
      expect_scale(core::block_scale(core::e8m0_scale(word, floor)),
                   reference::scale_of(largest, rule), largest);
    }
  }
}

TEST(Scale, IsWhatTheRulePromises) {
  int saturating = 0, finite = 0;
  for (int bits = 1; bits < 0x7f80; ++bits) {
    double const largest = of_bf16(bits);
    std::uint32_t const word = core::fp32_bits(static_cast<float>(largest));
    auto const code = [&](core::BlockScale const& scale) {
      return core::to_fp32(core::quantise(static_cast<float>(largest), scale));
    };
    auto const exact = core::fp32_scale(word);
    if (largest >= 448 * 0x1p-126) {
      ASSERT_EQ(code(exact), 448) << largest;
    }
    double const scale = core::to_fp32(core::e8m0_scale(word, false));
    ASSERT_LE(largest, 448 * scale);  // nothing saturates
    if (scale > 0x1p-127) {
      ASSERT_GT(largest, 448 * scale / 2);  // and half of it would not do
    }
    ASSERT_EQ(core::pow2_scale(word).scale, scale);
    if (scale > 0x1p-127) {
      ASSERT_GE(code(core::pow2_scale(word)), 224) << largest;
    }
    double const lower = core::to_fp32(core::e8m0_scale(word, true));
    ASSERT_TRUE(lower == scale || lower == scale / 2);
    if (lower > 0x1p-127) {
      ++finite;
      saturating += largest > 448 * lower ? 1 : 0;
    }
  }
  EXPECT_NEAR(static_cast<double>(saturating) / finite, 0.24, 0.01);  // mantissas above 1.75
}

}  // namespace
}  // namespace tessera
