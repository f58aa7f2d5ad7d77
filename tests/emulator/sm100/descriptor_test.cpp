// SPDX-License-Identifier: Apache-2.0
// Descriptors as kernels make them, and places as the emulator decodes them, against those that CuTe printed
// (golden.inc): two programs that share no line with it.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/arch/sm100/tcgen05_descriptor.hpp"
#include "tessera/low_precision.hpp"
#include "tests/emulator/sm100/decode.hpp"
#include "tests/emulator/sm100/multiply.hpp"

namespace tessera::emulator {
namespace {

using namespace cuda::arch;

struct Printed {
  std::uint64_t bits;
  unsigned step;
  int rows, k, element_bytes;
};
std::map<std::string, Printed> const& printed() {
  static std::map<std::string, Printed> const all = {
#define OPERAND(name, bits, step, rows, k, bytes) {#name, {bits, step, rows, k, bytes}},
#define PLACE(...)
#define BF16(...)
#define MXF8(...)
#define SHARE(...)
#define ACCUMULATOR(...)
#define SCALE(...)
#define ATOM(...)
#define TENSOR_SCALE(...)
#include "tests/emulator/sm100/golden.inc"
#undef OPERAND
  };
  return all;
}
bool is_rows_major(std::string const& name) { return name.find("_rows_") != std::string::npos; }

TEST(Descriptors, OfOperandsAreThoseOfCute) {
  auto const expect = [](char const* name, MmaOperand const& operand, std::uint32_t step) {
    EXPECT_EQ(operand.bits(), printed().at(name).bits) << name;
    EXPECT_EQ(step, printed().at(name).step) << name;
  };
  expect("bf16_k_128", k_major_tile(0), kKMajorStepBytes);
  expect("bf16_k_256", k_major_tile(0), kKMajorStepBytes);
  expect("bf16_rows_128", rows_major_boxes(0), kRowsMajorStepBytes);
  expect("bf16_rows_256", rows_major_boxes(0), kRowsMajorStepBytes);
  expect("e4m3_k_128", k_major_tile(0), kKMajorStepBytes);
  expect("bf16_k_swizzle64", {.address = 0, .stride_bytes = 512, .swizzle = MmaSwizzle::k64}, 32);
  expect("bf16_k_plain",
         {.address = 0, .leading_bytes = 2048, .stride_bytes = 128, .swizzle = MmaSwizzle::kNone},
         4096);
  expect("e4m3_rows_256", {.address = 0, .leading_bytes = 16384}, 4096);
}

TEST(Descriptors, HaveTheAddress) {
  for (std::uint32_t const address : {0u, 1024u, 65536u, 0x38c00u}) {
    std::uint64_t const bits = k_major_tile(address).bits();
    EXPECT_EQ(decode_operand(bits).address, address);
    EXPECT_EQ(decode_operand(plus(bits, 96)).address, address + 96);
    EXPECT_EQ(bits & ~std::uint64_t{0x3fff}, k_major_tile(0).bits());
  }
}

TEST(Descriptors, OfInstructionsAreThoseOfCute){
#undef BF16
#define BF16(m_, n_, a, b, bits_)                                                         \
  {                                                                                       \
    Bf16Mma const made{.m = m_, .n = n_, .a_major = MmaMajor::a, .b_major = MmaMajor::b}; \
    EXPECT_EQ(made.bits(), bits_) << m_ << " x " << n_;                                   \
    Instruction const i = decode_instruction(MmaKind::bf16, bits_, (m_) / 128);           \
    EXPECT_EQ(i.m, m_);                                                                   \
    EXPECT_EQ(i.n, n_);                                                                   \
    EXPECT_EQ(i.a_rows_major, MmaMajor::a == MmaMajor::kRows);                            \
    EXPECT_EQ(i.b_rows_major, MmaMajor::b == MmaMajor::kRows);                            \
  }
#undef MXF8
#define MXF8(m_, n_, a, b, a_byte, b_byte, bits_)                               \
  {                                                                             \
    Mxf8Mma const made{.m = m_,                                                 \
                       .n = n_,                                                 \
                       .a_scale_byte = a_byte,                                  \
                       .b_scale_byte = b_byte,                                  \
                       .a_format = MmaFormat8::a,                               \
                       .b_format = MmaFormat8::b};                              \
    EXPECT_EQ(made.bits(), bits_) << m_ << " x " << n_;                         \
    Instruction const i = decode_instruction(MmaKind::mxf8, bits_, (m_) / 128); \
    EXPECT_EQ(i.m, m_);                                                         \
    EXPECT_EQ(i.n, n_);                                                         \
    EXPECT_EQ(i.a_scale_byte, a_byte);                                          \
    EXPECT_EQ(i.b_scale_byte, b_byte);                                          \
    EXPECT_EQ(i.a_format, static_cast<int>(MmaFormat8::a));                     \
    EXPECT_EQ(i.b_format, static_cast<int>(MmaFormat8::b));                     \
  }
#define OPERAND(...)
#include "tests/emulator/sm100/golden.inc"
#undef BF16
#undef MXF8
#define BF16(...)
#define MXF8(...)
}

TEST(Decoder, FindsElementsWhereCuteHasThem) {
  int places = 0;
  auto const expect = [&](std::string const& name, int row, int k, unsigned at) {
    Printed const& p = printed().at(name);
    int const step_k = 32 / p.element_bytes;
    SharedOperand const part =
        decode_operand(plus(p.bits, p.step * static_cast<unsigned>(k / step_k)));
    EXPECT_EQ(place(part, is_rows_major(name), p.element_bytes, row, k % step_k), at)
        << name << " row " << row << " k " << k;
    ++places;
  };
#undef PLACE
#define PLACE(name, row, k, at) expect(#name, row, k, at);
#include "tests/emulator/sm100/golden.inc"
#undef PLACE
#define PLACE(...)
  EXPECT_EQ(places, 8 * 24);
}

TEST(Decoder, FindsAccumulatorsWhereCuteHasThem) {
  int cells = 0;
  auto const expect = [&](int ctas, int m, int n, int rank, int row, int column, unsigned lane,
                          unsigned tensor_column) {
    Cell const cell = place_of_d(ctas, m, n, row, column);
    EXPECT_EQ(cell.rank, rank) << m << " row " << row;
    EXPECT_EQ(cell.lane, static_cast<int>(lane)) << m << " row " << row << " column " << column;
    EXPECT_EQ(cell.column, static_cast<int>(tensor_column)) << m << " column " << column;
    ++cells;
  };
  auto const expect_share = [](int ctas, int m, int n, int rank, int a, int a_rows, int b,
                               int b_rows) {
    EXPECT_EQ(share_of_a(ctas, m, rank).first, a);
    EXPECT_EQ(share_of_a(ctas, m, rank).count, a_rows);
    EXPECT_EQ(share_of_b(ctas, n, rank).first, b);
    EXPECT_EQ(share_of_b(ctas, n, rank).count, b_rows);
  };
#undef ACCUMULATOR
#undef SHARE
#define ACCUMULATOR(...) expect(__VA_ARGS__);
#define SHARE(...) expect_share(__VA_ARGS__);
#include "tests/emulator/sm100/golden.inc"
  EXPECT_EQ(cells, 5 * 16);
#undef ACCUMULATOR
#undef SHARE
#define ACCUMULATOR(...)
#define SHARE(...)
}

TEST(Scales, LieInMemoryWhereCuteHasThem) {
  int scales = 0;
#undef SCALE
#define SCALE(rows, k_all, row, k, at)                                                          \
  EXPECT_EQ(scale_atom_offset(row, (k) / 32, (k_all) / 32), at) << "row " << row << " k " << k; \
  EXPECT_LT(at, scale_atom_bytes(rows, (k_all) / 32));                                          \
  ++scales;
#include "tests/emulator/sm100/golden.inc"
#undef SCALE
#define SCALE(...)
  EXPECT_EQ(scales, 2 * 24);
}

// A byte of an atom is copied to the cell that has it in all four groups of lanes, and multiplications find it there.
void expect_scale(int row, int k, int at, int lane, int column, int byte) {
  constexpr unsigned char kMark = 0x90;
  unsigned char atoms[1024] = {};
  atoms[at] = kMark;
  auto const cells = std::make_unique<Cells>();
  for (int atom = 0; atom < 2; ++atom) {
    copy_atom(*cells, atom * kScaleColumns, atoms + atom * 512);
  }
  for (int l = 0; l < kLanes; ++l) {
    for (int c = 0; c < 2 * kScaleColumns; ++c) {
      bool const is_marked = l % 32 == lane && c == column;
      EXPECT_EQ(cells->bits[l][c], is_marked ? std::uint32_t{kMark} << 8 * byte : 0u)
          << "row " << row << " k " << k << ", lane " << l << " column " << c;
    }
  }
  auto const m = std::make_unique<Multiplied>();
  for (int step = 0; step < 4; ++step) {
    m->instruction = decode_instruction(
        MmaKind::mxf8,
        Mxf8Mma{.m = 256, .n = 256, .a_scale_byte = step, .b_scale_byte = step}.bits(), 2);
    read_scales(*m, *cells, {}, 2, 0);
    for (int r = 0; r < 256; ++r) {
      float const wanted = r == row && step == k / 32 ? 0x1p17f : 0x1p-127f;
      EXPECT_EQ(m->b_scale[0][r], wanted) << "row " << row << " k " << k << " read as " << r;
      if (r < 128) {
        EXPECT_EQ(m->a_scale[r], wanted) << "row " << row << " k " << k << " read as " << r;
      }
    }
  }
}

TEST(Scales, LieInTensorMemoryWhereCuteHasThem) {
  int atoms = 0, scales = 0;
#undef ATOM
#undef TENSOR_SCALE
#define ATOM(name, bits_)                                 \
  EXPECT_EQ(scale_atom(0).bits(), bits_) << #name;        \
  EXPECT_EQ(decode_operand(bits_).stride, 128u) << #name; \
  ++atoms;
#define TENSOR_SCALE(name, row, k, at, lane, column, byte) \
  expect_scale(row, k, at, lane, column, byte);            \
  ++scales;
#include "tests/emulator/sm100/golden.inc"
#undef ATOM
#undef TENSOR_SCALE
  EXPECT_EQ(atoms, 4);
  EXPECT_EQ(scales, 4 * 24);
}

template <class F>
std::string what(F f) {
  try {
    f();
  } catch (std::runtime_error const& e) {
    return e.what();
  }
  return "";
}

TEST(Decoder, RefusesWordsThatSayNothingLegal) {
  std::uint64_t const good = k_major_tile(0).bits();
  EXPECT_EQ(what([&] { decode_operand(good); }), "");
  EXPECT_NE(what([&] { decode_operand(good & ~(std::uint64_t{7} << 46)); }).find("version 0"),
            std::string::npos);
  for (int const bit : {14, 30, 49, 52, 53, 60}) {
    EXPECT_NE(what([&] { decode_operand(good | std::uint64_t{1} << bit); }), "") << bit;
  }
  EXPECT_NE(what([&] { decode_operand(good | std::uint64_t{1} << 61); }), "");  // swizzle 3
  std::uint32_t const instruction = Bf16Mma{.m = 128, .n = 256}.bits();
  auto const decode = [&](std::uint32_t bits, int ctas = 1) {
    return what([&] { decode_instruction(MmaKind::bf16, bits, ctas); });
  };
  EXPECT_EQ(decode(instruction), "");
  for (int const bit : {0, 2, 3, 6, 8, 11, 13, 23, 29, 31}) {
    EXPECT_NE(decode(instruction ^ 1u << bit), "") << bit;
  }
  EXPECT_NE(decode(Bf16Mma{.m = 256, .n = 256}.bits()).find("M = 256 by 1 CTAs"),
            std::string::npos);
  EXPECT_EQ(decode(Bf16Mma{.m = 256, .n = 256}.bits(), 2), "");
  EXPECT_NE(decode(Bf16Mma{.m = 128, .n = 8}.bits()).find("N = 8"), std::string::npos);
  EXPECT_NE(decode(Bf16Mma{.m = 128, .n = 272}.bits()).find("N = 272"), std::string::npos);
  std::uint32_t const scaled = Mxf8Mma{.m = 128, .n = 128}.bits();
  auto const decode_scaled = [&](std::uint32_t bits) {
    return what([&] { decode_instruction(MmaKind::mxf8, bits, 1); });
  };
  EXPECT_EQ(decode_scaled(scaled), "");
  EXPECT_NE(decode_scaled(scaled ^ 1u << 23).find("scales are not ue8m0"), std::string::npos);
  for (int const bit : {0, 2, 3, 6, 8, 9, 11, 12, 13, 31}) {
    EXPECT_NE(decode_scaled(scaled ^ 1u << bit), "") << bit;
  }
  EXPECT_NE(decode_scaled(instruction), "");  // of bf16
}

TEST(Decoder, KnowsTheCodesOf8Bits) {
  EXPECT_EQ(decode_e4m3(0x7e), 448.0f);
  EXPECT_EQ(decode_e4m3(0x01), 0x1p-9f);
  EXPECT_EQ(decode_e4m3(0xb8), -1.0f);
  EXPECT_EQ(decode_e5m2(0x7b), 57344.0f);
  EXPECT_EQ(decode_e5m2(0x01), 0x1p-16f);
  EXPECT_EQ(decode_e5m2(0xbc), -1.0f);
}

}  // namespace
}  // namespace tessera::emulator
