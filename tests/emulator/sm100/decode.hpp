// SPDX-License-Identifier: Apache-2.0
// What the words of tcgen05 mean, bit by bit, from the PTX ISA: the emulator reads nothing but these bits. Written
// apart from src/cuda/arch/sm100/tcgen05_descriptor.hpp, which makes them, and compared with CuTe (golden.inc). A word
// that says something illegal, or something that is not emulated, throws std::runtime_error with the rule.
#pragma once

#include <cstdint>

namespace tessera::emulator {

enum class MmaKind { bf16, mxf8 };

struct Instruction {
  MmaKind kind;
  int m, n, k;
  bool a_rows_major, b_rows_major;
  int a_format, b_format;  // mxf8: 0 e4m3, 1 e5m2
  int a_scale_byte, b_scale_byte;
  [[nodiscard]] int element_bytes() const { return kind == MmaKind::bf16 ? 2 : 1; }
};
Instruction decode_instruction(MmaKind kind, std::uint32_t bits, int ctas);

struct SharedOperand {
  std::uint32_t address, leading, stride;  // bytes
  int swizzle;                             // width in bytes; 0: none
};
SharedOperand decode_operand(std::uint64_t bits);
// Where element (row, k) of an operand lies in shared memory.
std::uint32_t place(SharedOperand const& operand, bool rows_major, int element_bytes, int row,
                    int k);

// Where D(row, column) lies: CTA of the pair, lane, column behind D's address.
struct Cell {
  int rank, lane, column;
};
Cell place_of_d(int ctas, int m, int n, int row, int column);
// Which rows of A and of B a CTA of a pair holds.
struct Share {
  int first, count;
};
Share share_of_a(int ctas, int m, int rank);
Share share_of_b(int ctas, int n, int rank);

float decode_e4m3(std::uint8_t code);
float decode_e5m2(std::uint8_t code);

}  // namespace tessera::emulator
