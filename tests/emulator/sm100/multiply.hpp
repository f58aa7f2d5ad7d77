// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a multiplication of tcgen05, and what it reads and writes, for the emulator alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tests/emulator/sm100/tensor_memory.hpp"

namespace tessera::emulator {

constexpr int kLanes = 128, kColumns = 512;
constexpr int kScaleColumns = 4;  // of an atom

struct Cells {
  std::uint32_t bits[kLanes][kColumns];
};

// The operands of one multiplication, decoded; scales as factors.
struct Multiplied {
  Instruction instruction;
  float a[256][32];
  float b[32][256];
  float a_scale[256], b_scale[2][256];  // of B in each CTA
};

// What CTA `rank` of `ctas` holds. wrong(16 bytes): what keeps a chunk from being read, or nothing. Returns the first
// such thing.
std::string read_share(Multiplied& m, unsigned char const* shared, MmaWords const& words, int ctas,
                       int rank, std::int64_t shared_bytes,
                       std::function<std::string(void const*)> const& wrong);
void read_scales(Multiplied& m, Cells const& cells, MmaWords const& words, int ctas, int rank);
// D = or += A * B^T, in the cells of CTA `rank` from `column` on.
void write_share(Multiplied const& m, Cells& cells, int column, int ctas, int rank, bool adds);
// 128 rows of four scales.
void copy_atom(Cells& cells, int column, unsigned char const* atom);

}  // namespace tessera::emulator
