// SPDX-License-Identifier: Apache-2.0
// quantise() and dequantise() byte for byte against the reference: blocks, rules, layouts, what is special, what is
// refused.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "tests/low_precision/support.hpp"

namespace tessera::low_precision_tests {
namespace {

using reference::Quantised;

constexpr std::int64_t kExperts = 2, kRows = 256, kWidth = 384;

/// Magnitudes of all sizes; among them blocks of zeros, with -0, NaN, infinity, subnormals, and mantissas round 1.75.
Values varied(std::int64_t rows = kExperts * kRows, std::int64_t width = kWidth) {
  Values values = normal(rows * width, 1);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      values[r * width + c] *=
          std::ldexp(1.0, static_cast<int>((r / 32 * 7 + c / 32 * 3) % 19 - 9));
    }
  }
  auto const fill = [&](std::int64_t row, std::int64_t column, std::int64_t columns, double value) {
    for (std::int64_t r = row; r < row + 32; ++r) {
      for (std::int64_t c = column; c < column + columns; ++c) values[r * width + c] = value;
    }
  };
  fill(32, 0, 128, 0.0);
  fill(33, 32, 32, -0.0);
  fill(96, 128, 128, 0x1p-130);  // subnormal
  fill(160, 128, 64, 1.75);
  fill(192, 128, 64, reference::to_bf16(1.76));
  fill(224, 128, 64, reference::to_bf16(-3e38));
  values[20 * width + 200] = kNan;
  values[21 * width + 100] = -kNan;
  values[22 * width + 70] = kInfinity;
  values[400 * width + 300] = -kInfinity;
  return values;
}

struct Library {
  std::vector<std::uint8_t> codes, transposed, scales;
};

struct Choice {
  QuantiseBlock block;
  ScaleRule rule;
  ScaleLayout layout = ScaleLayout::matrix;
};

std::vector<std::int64_t> scale_shape(Choice const& choice) {
  Block const block = block_of(choice.block);
  switch (choice.layout) {
    case ScaleLayout::columns:
      return {kExperts, kWidth / 128, padded_scale_rows(kRows)};
    case ScaleLayout::atoms:
      return {kExperts, choice.block == QuantiseBlock::column_32
                            ? scale_atom_bytes(kWidth, kRows / 32)
                            : scale_atom_bytes(kRows, kWidth / 32)};
    case ScaleLayout::matrix:
      break;
  }
  return {kExperts, kRows / block.rows, kWidth / block.columns};
}

template <class Pointer>
auto view(Pointer data, DType dtype, std::vector<std::int64_t> const& shape) {
  auto out = shape.size() == 2 ? tensor(data, dtype, {shape[0], shape[1]})
                               : tensor(data, dtype, {shape[0], shape[1], shape[2]});
  return out;
}

bool has_bytes(Choice const& choice) { return choice.rule >= ScaleRule::rceil; }

Library run(Choice const& choice, void const* values, DType dtype, int threads) {
  auto const shape = scale_shape(choice);
  std::int64_t count = 1;
  for (std::int64_t const extent : shape) count *= extent;
  std::size_t const codes = kExperts * kRows * kWidth;
  Library out{std::vector<std::uint8_t>(codes, 0xaa), std::vector<std::uint8_t>(codes, 0xaa),
              std::vector<std::uint8_t>(count * (has_bytes(choice) ? 1 : 4), 0xaa)};
  QuantiseArgs const args{
      .block = choice.block,
      .rule = choice.rule,
      .layout = choice.layout,
      .values = tensor(values, dtype, {kExperts, kRows, kWidth}),
      .codes = tensor(out.codes.data(), DType::fp8_e4m3, {kExperts, kRows, kWidth}),
      .codes_transposed = tensor(out.transposed.data(), DType::fp8_e4m3, {kExperts, kWidth, kRows}),
      .scales = view(static_cast<void*>(out.scales.data()),
                     has_bytes(choice) ? DType::e8m0 : DType::fp32, shape)};
  Status const status = quantise(context(threads), args);
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}

/// The bytes of a scale, as the library stores it.
std::vector<std::uint8_t> scale_bytes(Choice const& choice, double scale) {
  if (has_bytes(choice)) return {e8m0_of(scale)};
  std::vector<std::uint8_t> out(4);
  std::uint32_t const word =
      std::isnan(scale) ? core::kFp32Nan : core::fp32_bits(static_cast<float>(scale));
  std::memcpy(out.data(), &word, 4);
  return out;
}

/// Where the scale of block (i, j) of expert e stands, written down once more.
std::int64_t place_of(Choice const& choice, std::int64_t e, std::int64_t i, std::int64_t j,
                      std::int64_t copy) {
  Block const block = block_of(choice.block);
  if (choice.layout == ScaleLayout::columns) return (e * (kWidth / 128) + j) * kRows + i;
  if (choice.layout == ScaleLayout::matrix) {
    return (e * (kRows / block.rows) + i) * (kWidth / block.columns) + j;
  }
  bool const columns = choice.block == QuantiseBlock::column_32;
  std::int64_t const row = columns ? j : choice.block == QuantiseBlock::row_32 ? i : 32 * i + copy;
  std::int64_t const k = columns ? i : j, blocks = (columns ? kRows : kWidth) / 32;
  std::int64_t const atoms = (columns ? kWidth : kRows) / 128 * (blocks / 4);
  std::int64_t const atom = e * atoms + row / 128 * (blocks / 4) + k / 4;
  // 32 lines of 16 bytes: line row mod 32, in it a word for each 32 rows, in it a byte for each block
  return atom * 512 + row % 32 * 16 + row / 32 % 4 * 4 + k % 4;
}

/// Compares with the reference; the scales' places are each met once.
void expect_reference(Choice const& choice, Library const& have, Values const& values) {
  Block const block = block_of(choice.block);
  Quantised const want = reference::quantise(values, kExperts * kRows, kWidth, block, choice.rule);
  for (std::int64_t r = 0; r < want.rows; ++r) {
    for (std::int64_t c = 0; c < want.width; ++c) {
      std::int64_t const i = r * want.width + c, e = r / kRows;
      ASSERT_EQ(have.codes[i], code_of(want.codes[i])) << r << ' ' << c << ' ' << values[i];
      ASSERT_EQ(have.transposed[(e * kWidth + c) * kRows + r % kRows], have.codes[i]);
    }
  }
  std::size_t const size = has_bytes(choice) ? 1 : 4;
  std::vector<std::uint8_t> places(have.scales.size(), 0);
  std::int64_t const copies =
      choice.layout == ScaleLayout::atoms && choice.block == QuantiseBlock::square_32 ? 32 : 1;
  for (std::int64_t r = 0; r < want.rows; r += block.rows) {
    for (std::int64_t c = 0; c < want.width; c += block.columns) {
      auto const bytes = scale_bytes(choice, want.scales[want.scale_index(r, c)]);
      for (std::int64_t copy = 0; copy < copies; ++copy) {
        std::size_t const at =
            size * place_of(choice, r / kRows, r % kRows / block.rows, c / block.columns, copy);
        ASSERT_LE(at + size, have.scales.size());
        ASSERT_EQ(std::memcmp(&have.scales[at], bytes.data(), size), 0) << r << ' ' << c;
        ASSERT_EQ(places[at]++, 0);
      }
    }
  }
  for (std::size_t i = 0; i < places.size(); i += size) ASSERT_EQ(places[i], 1) << i;
}

constexpr Choice kChoices[] = {
    {QuantiseBlock::row_128, ScaleRule::fp32},
    {QuantiseBlock::row_128, ScaleRule::pow2},
    {QuantiseBlock::row_128, ScaleRule::fp32, ScaleLayout::columns},
    {QuantiseBlock::square_128, ScaleRule::fp32},
    {QuantiseBlock::square_128, ScaleRule::pow2},
    {QuantiseBlock::row_32, ScaleRule::rceil},
    {QuantiseBlock::row_32, ScaleRule::floor},
    {QuantiseBlock::row_32, ScaleRule::rceil, ScaleLayout::atoms},
    {QuantiseBlock::column_32, ScaleRule::rceil},
    {QuantiseBlock::column_32, ScaleRule::floor, ScaleLayout::atoms},
    {QuantiseBlock::square_32, ScaleRule::rceil},
    {QuantiseBlock::square_32, ScaleRule::floor, ScaleLayout::atoms},
};

std::string name_of(::testing::TestParamInfo<Choice> const& info) {
  Choice const& choice = info.param;
  constexpr char const* kBlocks[] = {"row_128", "square_128", "row_32", "column_32", "square_32"};
  constexpr char const* kRules[] = {"fp32", "pow2", "rceil", "floor"};
  constexpr char const* kLayouts[] = {"matrix", "columns", "atoms"};
  return std::string(kBlocks[static_cast<int>(choice.block)]) + "_" +
         kRules[static_cast<int>(choice.rule)] + "_" + kLayouts[static_cast<int>(choice.layout)];
}
class EveryChoice : public ::testing::TestWithParam<Choice> {};
INSTANTIATE_TEST_SUITE_P(Quantise, EveryChoice, ::testing::ValuesIn(kChoices), name_of);

TEST_P(EveryChoice, HasTheBytesOfTheReference) {
  Values const values = varied();
  auto const halves = packed(values);
  std::vector<float> const floats(values.begin(), values.end());
  Library const have = run(GetParam(), halves.data(), DType::bf16, 1);
  expect_reference(GetParam(), have, values);
  for (int const threads : {1, 3}) {
    Library const again = run(GetParam(), floats.data(), DType::fp32, threads);
    EXPECT_EQ(again.codes, have.codes);
    EXPECT_EQ(again.transposed, have.transposed);
    EXPECT_EQ(again.scales, have.scales);
  }
}

TEST_P(EveryChoice, TakesFp32ThatAreNotBf16) {
  Values values = varied();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) {
      values[i] = static_cast<float>(values[i] * (1 + 0.003 * static_cast<double>(i % 97) / 97));
    }
  }
  std::vector<float> const floats(values.begin(), values.end());
  expect_reference(GetParam(), run(GetParam(), floats.data(), DType::fp32, 3), values);
}

TEST_P(EveryChoice, ComesBack) {
  Choice const choice = GetParam();
  Values const values = varied();
  auto const halves = packed(values);
  Library library = run(choice, halves.data(), DType::bf16, 1);
  Quantised const want =
      reference::quantise(values, kExperts * kRows, kWidth, block_of(choice.block), choice.rule);
  Values const exact = reference::dequantised(want);
  std::vector<core::Bf16> rounded(values.size());
  std::vector<float> floats(values.size());
  for (bool const bf16 : {true, false}) {
    DequantiseArgs const args{
        .block = choice.block,
        .layout = choice.layout,
        .codes = tensor(static_cast<void const*>(library.codes.data()), DType::fp8_e4m3,
                        {kExperts, kRows, kWidth}),
        .scales = view(static_cast<void const*>(library.scales.data()),
                       has_bytes(choice) ? DType::e8m0 : DType::fp32, scale_shape(choice)),
        .values = bf16 ? tensor(static_cast<void*>(rounded.data()), DType::bf16,
                                {kExperts, kRows, kWidth})
                       : tensor(floats.data(), {kExperts, kRows, kWidth})};
    Status const status = dequantise(context(3), args);
    ASSERT_TRUE(status.ok()) << status.text();
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(exact[i])) {
      ASSERT_TRUE(std::isnan(floats[i]) && std::isnan(core::to_fp32(rounded[i]))) << i;
      continue;
    }
    ASSERT_EQ(floats[i], static_cast<float>(exact[i])) << i;
    ASSERT_EQ(core::to_fp32(rounded[i]), reference::to_bf16(exact[i])) << i;
  }
}

TEST(Quantise, SpecialBlocksAreAsWritten) {
  std::vector<float> values(4 * 128, 1.0f);
  values[5] = NAN;
  values[128 + 7] = -HUGE_VALF;
  for (int i = 256; i < 384; ++i) values[i] = i % 2 == 0 ? 0.0f : -0.0f;
  values[384] = -448;
  std::vector<std::uint8_t> codes(values.size());
  std::vector<float> scales(4);
  ASSERT_TRUE(quantise(context(1), {.values = tensor(std::as_const(values).data(), {4, 128}),
                                    .codes = tensor(codes.data(), DType::fp8_e4m3, {4, 128}),
                                    .scales = tensor(scales.data(), {4, 1})})
                  .ok());
  for (int i = 0; i < 256; ++i) ASSERT_EQ(codes[i], 0x7f);
  EXPECT_TRUE(std::isnan(scales[0]) && std::isnan(scales[1]));
  for (int i = 256; i < 384; ++i) ASSERT_EQ(codes[i], i % 2 == 0 ? 0x00 : 0x80);
  EXPECT_EQ(scales[2], 1);
  EXPECT_EQ(codes[384], 0xfe);
}

TEST(Quantise, ReadsStridedRows) {
  Values const values = normal(4 * 128, 3);
  std::vector<float> wide(4 * 200, NAN);
  std::vector<float> const dense(values.begin(), values.end());
  for (int r = 0; r < 4; ++r) std::copy_n(&dense[r * 128], 128, &wide[r * 200]);
  std::vector<std::uint8_t> codes(512), want(512);
  std::vector<float> scales(4), want_scales(4);
  auto const with = [&](ConstTensor const& source, std::vector<std::uint8_t>& to,
                        std::vector<float>& scale) {
    Status const status =
        quantise(context(1), {.values = source,
                              .codes = tensor(to.data(), DType::fp8_e4m3, {4, 128}),
                              .scales = tensor(scale.data(), {4, 1})});
    ASSERT_TRUE(status.ok()) << status.text();
  };
  ConstTensor strided = tensor(std::as_const(wide).data(), {4, 128});
  strided.stride[0] = 200;
  with(strided, codes, scales);
  with(tensor(dense.data(), {4, 128}), want, want_scales);
  EXPECT_EQ(codes, want);
  EXPECT_EQ(scales, want_scales);
}

TEST(Quantise, PadsColumnsOfScalesWithZeros) {
  std::vector<float> const values(6 * 256, 448.0f);
  std::vector<std::uint8_t> codes(values.size());
  std::vector<float> scales(16, NAN);
  Status const status =
      quantise(context(1), {.rule = ScaleRule::pow2,
                            .layout = ScaleLayout::columns,
                            .values = tensor(values.data(), {6, 256}),
                            .codes = tensor(codes.data(), DType::fp8_e4m3, {6, 256}),
                            .scales = tensor(scales.data(), {2, 8})});
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(scales, (std::vector<float>{1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0}));
}

TEST(Quantise, TakesNoRowsAtAll) {
  EXPECT_TRUE(
      quantise(context(1), {.values = tensor(static_cast<float const*>(nullptr), {0, 128}),
                            .codes = tensor(static_cast<void*>(nullptr), DType::fp8_e4m3, {0, 128}),
                            .scales = tensor(static_cast<float*>(nullptr), {0, 1})})
          .ok());
}

TEST(ScaleAtoms, PlacesArePermutationsOfWholeAtoms) {
  static_assert(scale_atom_offset(1, 0, 4) == 16 && scale_atom_offset(32, 0, 4) == 4 &&
                scale_atom_offset(0, 1, 4) == 1 && scale_atom_offset(0, 4, 8) == 512 &&
                scale_atom_offset(128, 0, 8) == 1024 && scale_atom_offset(127, 3, 4) == 511);
  for (std::int64_t const rows : {128, 384}) {
    for (std::int64_t const blocks : {4, 5, 12}) {
      std::set<std::int64_t> places;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t k = 0; k < blocks; ++k) {
          places.insert(scale_atom_offset(r, k, blocks));
        }
      }
      EXPECT_EQ(std::ssize(places), rows * blocks);
      EXPECT_LT(*places.rbegin(), scale_atom_bytes(rows, blocks));
    }
  }
}

TEST(ScaleAtoms, PaddingIsZero) {
  std::vector<float> const values(160 * 32, 3.0f);  // two atoms of rows, one block of four
  std::vector<std::uint8_t> codes(values.size()), scales(1024, 0xaa);
  Status const status =
      quantise(context(1), {.block = QuantiseBlock::row_32,
                            .rule = ScaleRule::rceil,
                            .layout = ScaleLayout::atoms,
                            .values = tensor(values.data(), {160, 32}),
                            .codes = tensor(codes.data(), DType::fp8_e4m3, {160, 32}),
                            .scales = tensor(scales.data(), DType::e8m0, {1024})});
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(std::count(scales.begin(), scales.end(), 0), 1024 - 160);
  EXPECT_EQ(std::count(scales.begin(), scales.end(), 120), 160);  // 3 / 448 <= 2^-7
}

/// A call that is right until `change` changes it.
Status changed(void (*change)(QuantiseArgs&)) {
  static std::vector<float> values(256 * 256, 1.0f), scales(512);
  static std::vector<std::uint8_t> codes(256 * 256), transposed(256 * 256), bytes(2048);
  QuantiseArgs args{.values = tensor(std::as_const(values).data(), {256, 256}),
                    .codes = tensor(codes.data(), DType::fp8_e4m3, {256, 256}),
                    .codes_transposed = tensor(transposed.data(), DType::fp8_e4m3, {256, 256}),
                    .scales = tensor(scales.data(), {256, 2})};
  change(args);
  return quantise(context(1), args);
}

TEST(Quantise, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(changed([](QuantiseArgs&) {}).ok());
  auto const expect = [](char const* text, void (*change)(QuantiseArgs&)) {
    Status const status = changed(change);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(std::string(status.text()).find(text), std::string::npos)
        << text << " is not in: " << status.text();
  };
  expect("block=9", [](QuantiseArgs& a) { a.block = static_cast<QuantiseBlock>(9); });
  expect("layout=-1", [](QuantiseArgs& a) { a.layout = static_cast<ScaleLayout>(-1); });
  expect("rule=4: not a value", [](QuantiseArgs& a) { a.rule = static_cast<ScaleRule>(4); });
  expect("rule=2 with block=0", [](QuantiseArgs& a) { a.rule = ScaleRule::rceil; });
  expect("rule=0 with block=2", [](QuantiseArgs& a) { a.block = QuantiseBlock::row_32; });
  expect("only row_128 has it", [](QuantiseArgs& a) {
    a.block = QuantiseBlock::square_128;
    a.layout = ScaleLayout::columns;
  });
  expect("only blocks of 32 have it", [](QuantiseArgs& a) { a.layout = ScaleLayout::atoms; });
  expect("width=200: blocks need a multiple of 128; pad it to 256",
         [](QuantiseArgs& a) { a.values.shape[1] = 200; });
  expect("rows=100: blocks need a multiple of 128; pad it to 128", [](QuantiseArgs& a) {
    a.block = QuantiseBlock::square_128;
    a.values.shape[0] = 100;
  });
  expect("values: rank 1", [](QuantiseArgs& a) { a.values.rank = 1; });
  expect("values: dtype int32", [](QuantiseArgs& a) { a.values.dtype = DType::int32; });
  expect("codes: dtype uint8", [](QuantiseArgs& a) { a.codes.dtype = DType::uint8; });
  expect("codes: missing", [](QuantiseArgs& a) { a.codes = {}; });
  expect("codes_transposed: shape", [](QuantiseArgs& a) { a.codes_transposed.shape[0] = 128; });
  expect("scales: shape [256,2]; [2,256] is needed",
         [](QuantiseArgs& a) { a.layout = ScaleLayout::columns; });
  expect("overlap", [](QuantiseArgs& a) { a.codes_transposed.data = a.codes.data; });
}

}  // namespace
}  // namespace tessera::low_precision_tests
