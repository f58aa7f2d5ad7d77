// SPDX-License-Identifier: Apache-2.0
#include "tests/emulator/sm100/multiply.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::emulator {
namespace {

float element(Instruction const& i, int format, unsigned char const* at) {
  if (i.kind == MmaKind::bf16) {
    std::uint16_t bits;
    std::memcpy(&bits, at, 2);
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
  return format == 0 ? decode_e4m3(*at) : decode_e5m2(*at);
}

float scale(std::uint8_t code) {
  return code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
}

}  // namespace

std::string read_share(Multiplied& m, unsigned char const* shared, MmaWords const& words, int ctas,
                       int rank, std::int64_t shared_bytes,
                       std::function<std::string(void const*)> const& wrong) {
  Instruction const& i = m.instruction;
  std::string said;
  auto const read = [&](std::uint64_t descriptor, bool rows_major, Share share, int format,
                        auto store) {
    SharedOperand const operand = decode_operand(descriptor);
    std::uint32_t checked = ~0u;
    for (int k = 0; k < i.k && said.empty(); ++k) {
      for (int row = 0; row < share.count; ++row) {
        std::uint32_t const at = place(operand, rows_major, i.element_bytes(), row, k);
        if (at + static_cast<std::uint32_t>(i.element_bytes()) > shared_bytes) {
          said = "a multiplication reads behind shared memory, at " + std::to_string(at);
          break;
        }
        if (at / 16 != checked && (rows_major || k % (16 / i.element_bytes()) == 0)) {
          checked = at / 16;
          said = wrong(shared + checked * 16);
          if (!said.empty()) break;
        }
        store(share.first + row, k, element(i, format, shared + at));
      }
    }
  };
  read(words.a, i.a_rows_major, share_of_a(ctas, i.m, rank), i.a_format,
       [&](int row, int k, float value) { m.a[row][k] = value; });
  read(words.b, i.b_rows_major, share_of_b(ctas, i.n, rank), i.b_format,
       [&](int row, int k, float value) { m.b[k][row] = value; });
  return said;
}

// Row r of an atom: all four groups of 32 lanes have it.
void read_scales(Multiplied& m, Cells const& cells, MmaWords const& words, int ctas, int rank) {
  Instruction const& i = m.instruction;
  auto const code = [&](std::uint32_t from, int row, int byte) {
    int const column = static_cast<int>(from & 0xffff) + row / 128 * kScaleColumns + row % 128 / 32;
    return static_cast<std::uint8_t>(cells.bits[row % 32][column] >> 8 * byte);
  };
  Share const own = share_of_a(ctas, i.m, rank);
  for (int row = 0; row < own.count; ++row) {
    m.a_scale[own.first + row] = scale(code(words.a_scales, row, i.a_scale_byte));
  }
  for (int row = 0; row < i.n; ++row) {
    m.b_scale[rank][row] = scale(code(words.b_scales, row, i.b_scale_byte));
  }
}

// Sums in the order of k. MX: of the 32 products first, then scaled and added.
void write_share(Multiplied const& m, Cells& cells, int column, int ctas, int rank, bool adds) {
  Instruction const& i = m.instruction;
  Share const own = share_of_a(ctas, i.m, rank);
  for (int row = own.first; row < own.first + own.count; ++row) {
    float sums[256];
    std::uint32_t* cell[256];
    for (int n = 0; n < i.n; ++n) {
      Cell const at = place_of_d(ctas, i.m, i.n, row, n);
      cell[n] = &cells.bits[at.lane][column + at.column];
    }
    bool const scaled = i.kind == MmaKind::mxf8;
    for (int n = 0; n < i.n; ++n) {
      sums[n] = adds && !scaled ? std::bit_cast<float>(*cell[n]) : 0.0f;
    }
    for (int k = 0; k < i.k; ++k) {
      float const a = m.a[row][k];
      float const* const b = m.b[k];
      for (int n = 0; n < i.n; ++n) sums[n] += a * b[n];
    }
    for (int n = 0; n < i.n; ++n) {
      if (scaled) {
        float const old = adds ? std::bit_cast<float>(*cell[n]) : 0.0f;
        sums[n] = old + sums[n] * (m.a_scale[row] * m.b_scale[rank][n]);
      }
      *cell[n] = std::bit_cast<std::uint32_t>(sums[n]);
    }
  }
}

void copy_atom(Cells& cells, int column, unsigned char const* atom) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int c = 0; c < kScaleColumns; ++c) {
      std::memcpy(&cells.bits[lane][column + c], atom + lane % 32 * 16 + c * 4, 4);
    }
  }
}

}  // namespace tessera::emulator
