// SPDX-License-Identifier: Apache-2.0
#include "huggingface/weight_blocks.hpp"

#include <algorithm>
#include <cstring>

namespace tessera::huggingface {

namespace {

struct Rows {
  std::int64_t gate, up;
};

Rows rows_of(WeightLayout const& layout, std::int64_t n, std::int64_t i) {
  switch (layout.order) {
    case GateUpOrder::concat:
      break;
    case GateUpOrder::up_first:
      return {n + i, i};
    case GateUpOrder::interleaved:
      return {2 * i, 2 * i + 1};
    case GateUpOrder::blocked: {
      std::int64_t const row = 2 * layout.block * (i / layout.block) + i % layout.block;
      return {row, row + layout.block};
    }
  }
  return {i, n + i};
}

// Calls copy(logical offset, gate's offset in the block, up's offset in the block, bytes) until everything is
// covered: whole rows, or single elements where the block is transposed.
template <class Copy>
void for_each_piece(BlockShape const& s, WeightLayout const& layout, Copy const& copy) {
  bool const transposed = layout.orientation == WeightOrientation::transposed;
  std::int64_t const n = s.intermediate, d = s.hidden;
  for (std::int64_t i = 0; i < n; ++i) {
    Rows const rows = rows_of(layout, n, i);
    std::size_t const logical = static_cast<std::size_t>(i * d) * s.element;
    if (!transposed) {
      auto const bytes = static_cast<std::size_t>(d) * s.element;
      copy(logical, static_cast<std::size_t>(rows.gate) * bytes,
           static_cast<std::size_t>(rows.up) * bytes, bytes);
      continue;
    }
    for (std::int64_t c = 0; c < d; ++c) {
      auto const column = static_cast<std::size_t>(c * 2 * n);
      copy(logical + static_cast<std::size_t>(c) * s.element,
           (column + static_cast<std::size_t>(rows.gate)) * s.element,
           (column + static_cast<std::size_t>(rows.up)) * s.element, s.element);
    }
  }
}

}  // namespace

void pack_gate_up(BlockShape const& shape, WeightLayout const& layout, ConstBytes gate,
                  ConstBytes up, Bytes block) {
  for_each_piece(shape, layout,
                 [&](std::size_t from, std::size_t gate_at, std::size_t up_at, std::size_t bytes) {
                   std::memcpy(block.data() + gate_at, gate.data() + from, bytes);
                   std::memcpy(block.data() + up_at, up.data() + from, bytes);
                 });
}

void unpack_gate_up(BlockShape const& shape, WeightLayout const& layout, ConstBytes block,
                    Bytes gate, Bytes up) {
  for_each_piece(shape, layout,
                 [&](std::size_t to, std::size_t gate_at, std::size_t up_at, std::size_t bytes) {
                   std::memcpy(gate.data() + to, block.data() + gate_at, bytes);
                   std::memcpy(up.data() + to, block.data() + up_at, bytes);
                 });
}

void transpose(std::int64_t rows, std::int64_t columns, std::size_t element, ConstBytes from,
               Bytes to) {
  constexpr std::int64_t kTile = 32;  // both sides stay within a few cache lines per row
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    for (std::int64_t c0 = 0; c0 < columns; c0 += kTile) {
      for (std::int64_t r = r0; r < std::min(rows, r0 + kTile); ++r) {
        for (std::int64_t c = c0; c < std::min(columns, c0 + kTile); ++c) {
          std::memcpy(to.data() + static_cast<std::size_t>(c * rows + r) * element,
                      from.data() + static_cast<std::size_t>(r * columns + c) * element, element);
        }
      }
    }
  }
}

}  // namespace tessera::huggingface
