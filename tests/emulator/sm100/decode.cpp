// SPDX-License-Identifier: Apache-2.0
#include "tests/emulator/sm100/decode.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace tessera::emulator {
namespace {

std::uint64_t field(std::uint64_t bits, int first, int count) {
  return bits >> first & ((std::uint64_t{1} << count) - 1);
}
void require(bool holds, std::string const& rule) {
  if (!holds) throw std::runtime_error(rule);
}
void require_zero(std::uint64_t bits, int first, int count, char const* word) {
  require(field(bits, first, count) == 0,
          std::string(word) + ": bits from " + std::to_string(first) + " on are reserved");
}

// Sign, exponent, fraction of a small float.
float small_float(unsigned code, int exponent_bits, int fraction_bits, int bias) {
  unsigned const exponent = code >> fraction_bits & ((1u << exponent_bits) - 1);
  unsigned const fraction = code & ((1u << fraction_bits) - 1);
  float const sign = code >> (exponent_bits + fraction_bits) & 1 ? -1.0f : 1.0f;
  float const scale = std::ldexp(1.0f, -fraction_bits);
  if (exponent == 0) {
    return sign * std::ldexp(static_cast<float>(fraction) * scale, 1 - bias);
  }
  return sign *
         std::ldexp(1.0f + static_cast<float>(fraction) * scale, static_cast<int>(exponent) - bias);
}

}  // namespace

Instruction decode_instruction(MmaKind kind, std::uint32_t bits, int ctas) {
  char const* const word = "instruction descriptor";
  Instruction i = {};
  i.kind = kind;
  require_zero(bits, 0, 4, word);  // sparsity, saturation
  require_zero(bits, 6, 1, word);
  i.a_format = static_cast<int>(field(bits, 7, 3));
  i.b_format = static_cast<int>(field(bits, 10, 3));
  require(field(bits, 13, 2) == 0, "instruction descriptor: negated operands are not emulated");
  i.a_rows_major = field(bits, 15, 1) != 0;
  i.b_rows_major = field(bits, 16, 1) != 0;
  i.n = static_cast<int>(field(bits, 17, 6)) * 8;
  i.m = static_cast<int>(field(bits, 24, 5)) * 16;
  if (kind == MmaKind::bf16) {
    i.k = 16;
    require(field(bits, 4, 2) == 1, "instruction descriptor: D is not fp32");
    require(i.a_format == 1 && i.b_format == 1, "instruction descriptor: A or B is not bf16");
    require_zero(bits, 23, 1, word);
    require_zero(bits, 29, 3, word);
  } else {
    i.k = 32;
    i.b_scale_byte = static_cast<int>(field(bits, 4, 2));
    require(i.a_format <= 1 && i.b_format <= 1,
            "instruction descriptor: only e4m3 and e5m2 are emulated");
    require(field(bits, 23, 1) == 1, "instruction descriptor: scales are not ue8m0");
    i.a_scale_byte = static_cast<int>(field(bits, 29, 2));
    require_zero(bits, 31, 1, word);
  }
  bool const m_fits = ctas == 1 ? i.m == 128 : i.m == 128 || i.m == 256;
  require(m_fits, "instruction descriptor: M = " + std::to_string(i.m) + " by " +
                      std::to_string(ctas) + " CTAs");
  require(i.n % 16 == 0 && i.n >= 16 && i.n <= 256,
          "instruction descriptor: N = " + std::to_string(i.n));
  return i;
}

SharedOperand decode_operand(std::uint64_t bits) {
  char const* const word = "shared-memory descriptor";
  SharedOperand o = {};
  auto const bytes = [&](int first) {
    return static_cast<std::uint32_t>(field(bits, first, 14)) << 4;
  };
  o.address = bytes(0);
  require_zero(bits, 14, 2, word);
  o.leading = bytes(16);
  require_zero(bits, 30, 2, word);
  o.stride = bytes(32);
  require(field(bits, 46, 3) == 1, "shared-memory descriptor: version " +
                                       std::to_string(field(bits, 46, 3)) +
                                       ", which is not that of Blackwell, 1");
  require(field(bits, 49, 3) == 0, "shared-memory descriptor: a base offset is not emulated");
  require(field(bits, 52, 1) == 0, "shared-memory descriptor: an absolute leading offset");
  require_zero(bits, 53, 8, word);
  switch (field(bits, 61, 3)) {
    case 0:
      o.swizzle = 0;
      break;
    case 2:
      o.swizzle = 128;
      break;
    case 4:
      o.swizzle = 64;
      break;
    case 6:
      o.swizzle = 32;
      break;
    default:
      throw std::runtime_error("shared-memory descriptor: swizzle " +
                               std::to_string(field(bits, 61, 3)) + " is not emulated");
  }
  return o;
}

std::uint32_t place(SharedOperand const& o, bool rows_major, int element_bytes, int row, int k) {
  auto const r = static_cast<std::uint32_t>(row), column = static_cast<std::uint32_t>(k);
  auto const size = static_cast<std::uint32_t>(element_bytes);
  auto const width = static_cast<std::uint32_t>(o.swizzle);
  std::uint32_t at = o.address;
  if (rows_major) {
    require(o.swizzle == 128,
            "shared-memory descriptor: rows-major without the 128-byte swizzle is not emulated");
    std::uint32_t const in_row = 128 / size;
    at += r / in_row * o.leading + column / 8 * o.stride + column % 8 * 128 + r % in_row * size;
  } else if (o.swizzle == 0) {
    at += r / 8 * o.stride + r % 8 * 16 + column * size / 16 * o.leading + column * size % 16;
  } else {
    at += r / 8 * o.stride + r % 8 * width + column * size;
  }
  // Of the chunk's number, as many bits as the swizzled row has.
  std::uint32_t const mask = o.swizzle == 0 ? 0 : width / 16 - 1;
  return at ^ (at >> 7 & mask) << 4;
}

Cell place_of_d(int ctas, int m, int n, int row, int column) {
  if (ctas == 1) return {0, row, column};
  int const own = m / 2, rank = row / own, lane = row % own;
  if (own == 128) return {rank, lane, column};
  // 64 rows of a CTA: the right half of their columns takes the upper lanes.
  bool const right = column >= n / 2;
  return {rank, lane + (right ? 64 : 0), right ? column - n / 2 : column};
}
Share share_of_a(int ctas, int m, int rank) { return {rank * m / ctas, m / ctas}; }
Share share_of_b(int ctas, int n, int rank) { return {rank * n / ctas, n / ctas}; }

float decode_e4m3(std::uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return small_float(code, 4, 3, 7);
}
float decode_e5m2(std::uint8_t code) {
  if ((code & 0x7c) == 0x7c) {
    if ((code & 3) != 0) return std::numeric_limits<float>::quiet_NaN();
    return code & 0x80 ? -std::numeric_limits<float>::infinity()
                       : std::numeric_limits<float>::infinity();
  }
  return small_float(code, 5, 2, 15);
}

}  // namespace tessera::emulator
